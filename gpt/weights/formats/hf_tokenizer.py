"""The tokenizer in Hugging Face's files: GPT-2's as vocab.json and merges.txt, others as tokenizer.json."""

import os
from pathlib import Path

from gpt.files import atomic_write, write_json
from gpt.tokenizer import Tokenizer
from gpt.vocabulary import END_OF_TEXT, byte_letters, merges, to_json


def write_tokenizer(tokenizer: Tokenizer, folder: str | os.PathLike[str], context_length: int) -> None:
    """Write the files from which `transformers.AutoTokenizer` produces the same ids.

    It encodes `<|endoftext|>` as the special token, as `Tokenizer.encode` does with `allow_special`.

    Raises:
        OSError: the folder cannot be written.
    """
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT)
    settings = {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False, **special}
    settings |= {"clean_up_tokenization_spaces": False, "model_max_length": context_length}
    if tokenizer.name != "gpt2":
        write_json(Path(folder) / "tokenizer.json", to_json(tokenizer.tokens, tokenizer.pattern))
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        write_json(Path(folder) / "tokenizer_config.json", settings)
        return
    letters = byte_letters()

    def spell(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    vocabulary = {spell(token): rank for rank, token in enumerate(tokenizer.tokens)}
    write_json(Path(folder) / "vocab.json", {**vocabulary, END_OF_TEXT: tokenizer.eot})
    with atomic_write(Path(folder) / "merges.txt") as file:
        file.write("#version: 0.2\n")
        file.writelines(f"{spell(a)} {spell(b)}\n" for a, b in filter(None, merges(tokenizer.tokens)))
    write_json(Path(folder) / "tokenizer_config.json", settings)
