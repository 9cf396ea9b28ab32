"""Finish and save matplotlib figures, and make labels that can be read."""

import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from gpt.errors import InputError
from gpt.files import atomic_write
from gpt.progress import short

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_VISIBLE = str.maketrans({" ": "·", "\n": "\u21b5", "\t": "\u2192", "\r": "\u240d"})


def save(figure: "Figure", path: str | os.PathLike[str]) -> None:
    """Write a figure as PNG or SVG, by the name's suffix. Raises InputError for any other suffix."""
    suffix = Path(path).suffix.lower()
    if suffix not in (".png", ".svg"):
        raise InputError(f"cannot draw {path}: expected a name that ends in .png or .svg")
    with atomic_write(path, "wb") as file:
        figure.savefig(file, format=suffix[1:], dpi=120)


def finish(axes: "Axes", x_label: str) -> None:
    """Give a plot of curves over steps, tokens or seconds its axis, its grid and its legend."""
    axes.set_xlabel(x_label)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.locator_params(axis="x", nbins=6)
    axes.xaxis.set_major_formatter(lambda value, _: short(value))
    axes.legend(frameon=False)


def legend_label(text: str) -> str:
    """Return a name for matplotlib's legend, where `$` would begin a formula and a first `_` hide it."""
    label = drawable(text).replace("$", r"\$")
    return f" {label}" if label.startswith("_") else label


def token_label(token: bytes) -> str:
    """Return a readable label for a token.

    Spaces and line ends are made visible. A token that is part of a character is written in hexadecimal. A
    character that the font lacks is written as its code point.
    """
    try:
        text = token.decode("utf-8").translate(_VISIBLE)
    except UnicodeDecodeError:
        return token.hex(" ")
    return drawable(text)


def drawable(text: str) -> str:
    """Return a text with the code point in place of each character that the font lacks."""
    return "".join(letter if _can_draw(letter) else f"U+{ord(letter):04X}" for letter in text)


def _can_draw(letter: str) -> bool:
    return letter.isprintable() and ord(letter) in _font()


@cache
def _font() -> frozenset[int]:
    from matplotlib.font_manager import findfont, get_font

    return frozenset(get_font(findfont("DejaVu Sans")).get_charmap())
