"""The tokenizer in Hugging Face's files: tokenizer.json, vocab.json, merges.txt, tokenizer_config.json."""

import os
from pathlib import Path
from typing import Any

from gpt.files import atomic_write, write_json
from gpt.tokenizer import Tokenizer
from gpt.vocabulary import END_OF_TEXT, to_json


def write_tokenizer(tokenizer: Tokenizer, folder: str | os.PathLike[str], context_length: int) -> None:
    """Write the files from which transformers and tokenizers produce the same ids.

    The padding token is `<|endoftext|>`. They encode `<|endoftext|>` in a text as the special token, as
    `Tokenizer.encode` does with `allow_special`. vocab.json and merges.txt are for GPT-2's words alone.
    """
    folder, is_gpt2 = Path(folder), tokenizer.name == "gpt2"
    content = to_json(tokenizer.tokens, tokenizer.pattern)
    if is_gpt2:
        vocabulary, pairs = spelled(content)
        write_json(folder / "vocab.json", vocabulary)
        with atomic_write(folder / "merges.txt") as file:
            file.write("#version: 0.2\n")
            file.writelines(f"{pair}\n" for pair in pairs)
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
        content |= {
            "pre_tokenizer": byte_level,
            "post_processor": {**byte_level, "trim_offsets": False},
            "decoder": byte_level,
            "model": {"type": "BPE", "vocab": vocabulary, "merges": pairs},
        }
    write_json(folder / "tokenizer.json", content)
    settings = {
        "tokenizer_class": "GPT2Tokenizer" if is_gpt2 else "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        **dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), END_OF_TEXT),
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_length,
    }
    write_json(folder / "tokenizer_config.json", settings)


def spelled(content: dict[str, Any]) -> tuple[dict[str, int], list[str]]:
    """The vocabulary with `<|endoftext|>`, and the merges as "first second", of a tokenizer.json."""
    vocabulary, merges = content["model"]["vocab"], content["model"]["merges"]
    return {**vocabulary, END_OF_TEXT: len(vocabulary)}, [" ".join(pair) for pair in merges]
