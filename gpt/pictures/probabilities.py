"""A picture of a text in which each token is shaded by how likely the model found it."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from gpt.errors import InputError
from gpt.pictures.attention import token_label
from gpt.pictures.runs import save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from gpt.model import GPT
    from gpt.tokenizer import Tokenizer

# One hue from light to dark, which every eye orders alike, no darker than black letters can be read on.
COLOURS, DARKEST, SMALLEST = "Oranges", 0.7, 1e-4
COLUMNS = 88
FONT_SIZE = 11
_COLUMN_INCHES = 0.602 * FONT_SIZE / 72  # the width of a letter of DejaVu Sans Mono
_ROW_INCHES = 0.3


def probabilities(
    checkpoint: str | None = None, text: str = "", output: Path = Path("probabilities.png")
) -> None:
    """Draw a text with each token shaded by its probability: the darker, the less the model expected it.

    Args:
        checkpoint: a checkpoint file, a run's folder or an imported one; the newest run if left out.
        text: what the model reads, at most its context.
        output: the picture to write, .png or .svg; an older one of that name is replaced.

    Raises:
        InputError: there is no such checkpoint, the text is empty or longer than the context.
    """
    from gpt.weights.load import load

    if not text:
        raise InputError("there is no text to read, name one with --text")
    model, tokenizer = load(checkpoint)
    found, labels = token_probabilities(model, tokenizer, text)
    save(shaded_text(found, labels), output)
    print(f"{output} shows {len(labels)} tokens")


def token_probabilities(model: "GPT", tokenizer: "Tokenizer", text: str) -> tuple[list[float], list[str]]:
    """The probability of each token of a text given those before it, the first after an end of text.

    Returns:
        The probabilities, and the tokens as a person can read them.

    Raises:
        InputError: the text has more tokens than the context.
    """
    from gpt.evaluation.scoring import score

    ids = tokenizer.encode(text)
    if len(ids) > model.config.context_length:
        raise InputError(
            f"the text has {len(ids)} tokens, more than the context_length {model.config.context_length}"
        )
    nats, _ = score(model, torch.tensor([[tokenizer.eot, *ids[:-1]]]), torch.tensor([ids]))  # (1, T)
    return (-nats[0]).exp().tolist(), [token_label(tokenizer.decode_bytes([i])) for i in ids]


def shaded_text(found: list[float], labels: list[str]) -> "Figure":
    """The tokens in reading order, a box behind each, and a scale of the shades below."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, LogNorm
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    places, rows = _lay_out(labels)
    width, height = COLUMNS * _COLUMN_INCHES + 0.4, rows * _ROW_INCHES + 1.2
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    text_height = rows * _ROW_INCHES / height
    axes = figure.add_axes((0.2 / width, 0.95 / height, 1 - 0.4 / width, text_height))
    axes.set(xlim=(0, COLUMNS), ylim=(rows, 0))
    axes.axis("off")
    shades = ListedColormap(colormaps[COLOURS]([DARKEST * (1 - i / 255) for i in range(256)]))
    scale = ScalarMappable(LogNorm(SMALLEST, 1.0, clip=True), shades)
    for colour, label, (row, column) in zip(scale.to_rgba(np.array(found)), labels, places, strict=True):
        axes.add_patch(Rectangle((column, row + 0.06), len(label), 0.88, facecolor=colour, edgecolor="white"))
        axes.text(
            column, row + 0.5, label, family="DejaVu Sans Mono", size=FONT_SIZE, va="center", parse_math=False
        )
    bar = figure.add_axes((0.25, 0.52 / height, 0.5, 0.14 / height))
    figure.colorbar(scale, cax=bar, orientation="horizontal", ticks=[1e-4, 1e-3, 1e-2, 0.1, 1.0])
    bar.set_xticklabels(["1/10,000 or less", "1/1,000", "1/100", "1/10", "1"])
    bar.set_xlabel("probability of the token after those before it")
    return figure


def _lay_out(labels: list[str]) -> tuple[list[tuple[int, int]], int]:
    """The row and column where each label begins, and how many rows there are. A line end begins a row."""
    places, row, column = [], 0, 0
    for label in labels:
        if column and column + len(label) > COLUMNS:
            row, column = row + 1, 0
        places.append((row, column))
        column += len(label)
        if label.endswith("\u21b5"):
            row, column = row + 1, 0
    return places, row + (column > 0)
