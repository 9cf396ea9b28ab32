"""The tokens of another program's weights: the files of a tokenizer beside them, or else GPT-2's."""

from pathlib import Path

import torch

from gpt.errors import InputError
from gpt.progress import notice_once
from gpt.text.table import read_table
from gpt.text.tokenizer import SMALLEST_SIZE, Tokenizer
from gpt.weights.formats.table import Weights

_GPT2_ROWS = (50257, 50304)  # those of the vocabulary, and nanoGPT's, which are a multiple of 64


def table_in(folder: Path) -> Path | None:
    """Return the file of the tokens in a folder: `tokenizer.json`, or `vocab.json` with `merges.txt`."""
    if (folder / "tokenizer.json").is_file():
        return folder / "tokenizer.json"
    has_both = all((folder / name).is_file() for name in ("vocab.json", "merges.txt"))
    return folder / "vocab.json" if has_both else None


def with_tokens(weights: Weights, table: Path) -> tuple[Weights, Tokenizer]:
    """Return the tokenizer in a file, and weights in which `<|endoftext|>` has its last id.

    Where the file has other tokens before it, its row and theirs change places. Raises InputError for a file
    that cannot be used, or an id without a row.
    """
    stored = read_table(table)
    tokenizer = Tokenizer.from_tokens(stored.tokens)
    if stored.end_of_text == tokenizer.eot:
        return weights, tokenizer
    count = len(weights["token_embedding.weight"])
    if not tokenizer.eot < stored.end_of_text < count:
        what = f"the end of a text has the id {stored.end_of_text}"
        raise InputError(f"{what}, but the weights have {count} rows and {tokenizer.eot} ordinary tokens")
    rows = torch.arange(count)
    rows[[tokenizer.eot, stored.end_of_text]] = rows[[stored.end_of_text, tokenizer.eot]]
    moved = dict(weights)
    for name in ("token_embedding.weight", "head.weight"):
        if name in moved:  # a tied head is not
            moved[name] = moved[name][rows]
    return moved, tokenizer


def tell_assumed(path: Path, vocab_size: int) -> None:
    """Tell the user that the tokens are taken for GPT-2's, unless there are as many as GPT-2 has.

    Nothing is told of fewer than a tokenizer can have: text cannot be written with them.
    """
    if vocab_size >= SMALLEST_SIZE and vocab_size not in _GPT2_ROWS:
        notice_once(
            f"{path} has no tokenizer: its {vocab_size:,} tokens are taken for the first of GPT-2's. If they "
            "are others, put their tokenizer.json beside the weights"
        )
