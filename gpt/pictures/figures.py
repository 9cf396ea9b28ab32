"""Making and saving matplotlib figures, without a display."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from gpt.errors import InputError
from gpt.files import atomic_write

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(
    width: float, height: float, layout: Literal["constrained"] | None = "constrained"
) -> "Figure":
    """An empty figure, width and height in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout=layout)
    FigureCanvasAgg(figure)
    return figure


def save(figure: "Figure", path: str | os.PathLike[str]) -> None:
    """Write a figure as PNG or SVG, according to the name's suffix.

    Raises:
        InputError: the name has another suffix.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in (".png", ".svg"):
        raise InputError(f"cannot draw {path}: expected a name that ends in .png or .svg")
    with atomic_write(path, "wb") as file:
        figure.savefig(file, format=suffix[1:], dpi=120)
