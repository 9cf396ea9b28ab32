"""Saving matplotlib's figures, and the tokens of a text with labels that can be read in them."""

import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from gpt.errors import InputError
from gpt.files import atomic_write
from gpt.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_VISIBLE = str.maketrans({" ": "·", "\n": "\u21b5", "\t": "\u2192", "\r": "\u240d"})


def save(figure: "Figure", path: str | os.PathLike[str]) -> None:
    """Write a figure as PNG or SVG, according to the name's suffix; InputError for any other."""
    suffix = Path(path).suffix.lower()
    if suffix not in (".png", ".svg"):
        raise InputError(f"cannot draw {path}: expected a name that ends in .png or .svg")
    with atomic_write(path, "wb") as file:
        figure.savefig(file, format=suffix[1:], dpi=120)


def labelled_tokens(tokenizer: Tokenizer, text: str, context_length: int) -> tuple[list[int], list[str]]:
    """The ids of a text and a readable label for each; InputError if it is empty or beyond the context."""
    ids = tokenizer.encode(text)
    if not ids:
        raise InputError("there is no text to read: give one with --text")
    if len(ids) > context_length:
        raise InputError(f"the text has {len(ids)} tokens, more than the context_length {context_length}")
    return ids, token_labels(tokenizer, ids)


def token_labels(tokenizer: Tokenizer, ids: Iterable[int]) -> list[str]:
    """A readable label for each token."""
    return [token_label(tokenizer.decode_bytes([i])) for i in ids]


def token_label(token: bytes) -> str:
    """A token with visible spaces and line ends, hex for part of a character, code points the font lacks."""
    try:
        text = token.decode("utf-8").translate(_VISIBLE)
    except UnicodeDecodeError:
        return token.hex(" ")
    return "".join(c if c.isprintable() and ord(c) in _font() else f"U+{ord(c):04X}" for c in text)


@cache
def _font() -> frozenset[int]:
    from matplotlib.font_manager import findfont, get_font

    return frozenset(get_font(findfont("DejaVu Sans")).get_charmap())
