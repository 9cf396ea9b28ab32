"""The tokenizer in Hugging Face's files: tokenizer.json, vocab.json, merges.txt, tokenizer_config.json.

tiktoken stores a rank for each token and merges the two neighbours that form the token of lowest rank.
merges.txt lists the pairs instead, in order. A token's pair is found by encoding its bytes with the lower
ranks only: two parts are left. This holds for any prefix of the ranks: tokens consist of lower-ranked ones.
"""

import os
from pathlib import Path

from gpt.files import atomic_write, write_json
from gpt.tokenizer import Tokenizer
from gpt.vocabulary import END_OF_TEXT, merges, spell, to_json


def write_tokenizer(tokenizer: Tokenizer, folder: str | os.PathLike[str], context_length: int) -> None:
    """Write the files from which transformers and tokenizers produce the same ids.

    The padding token is `<|endoftext|>`. They encode `<|endoftext|>` in a text as the special token, as
    `Tokenizer.encode` does with `allow_special`.

    Raises:
        OSError: the folder cannot be written.
    """
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), END_OF_TEXT)
    settings = {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False, **special}
    settings |= {"clean_up_tokenization_spaces": False, "model_max_length": context_length}
    if tokenizer.name != "gpt2":
        write_json(Path(folder) / "tokenizer.json", to_json(tokenizer.tokens, tokenizer.pattern))
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        write_json(Path(folder) / "tokenizer_config.json", settings)
        return
    vocabulary, pairs = spelled(tokenizer)
    write_json(Path(folder) / "vocab.json", vocabulary)
    with atomic_write(Path(folder) / "merges.txt") as file:
        file.write("#version: 0.2\n")
        file.writelines(f"{pair}\n" for pair in pairs)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    eot = {"id": tokenizer.eot, "content": END_OF_TEXT, "special": True}
    eot |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    fast = {
        "version": "1.0",
        "added_tokens": [eot],
        "pre_tokenizer": byte_level,
        "post_processor": {**byte_level, "trim_offsets": False},
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": pairs},
    }
    write_json(Path(folder) / "tokenizer.json", fast)
    write_json(Path(folder) / "tokenizer_config.json", settings)


def spelled(tokenizer: Tokenizer) -> tuple[dict[str, int], list[str]]:
    """The vocabulary and the merges, "first second", with a printable character for each byte."""
    tokens = tokenizer.tokens
    vocabulary = {spell(token): rank for rank, token in enumerate(tokens)}
    pairs = [f"{spell(first)} {spell(second)}" for first, second in filter(None, merges(tokens))]
    return {**vocabulary, END_OF_TEXT: tokenizer.eot}, pairs
