"""`gpt probabilities`: a picture of a text with each token shaded by its probability under the model."""

import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from gpt.errors import InputError
from gpt.evaluation.scoring import score
from gpt.files import atomic_write, check_free
from gpt.model import GPT
from gpt.pictures.figures import labelled_tokens, save
from gpt.text.tokenizer import Tokenizer
from gpt.weights.load import Device, load_each

COLUMNS = 88
_FONT_SIZE = 11
_COLUMN_INCHES = 0.602 * _FONT_SIZE / 72  # the width of a letter of DejaVu Sans Mono
_ROW_INCHES = 0.3


def probabilities(
    checkpoint: str | None = None,
    text: str = "",
    output: Path | None = None,
    device: Device = "auto",
    overwrite: bool = False,
    snapshots: bool = False,
) -> None:
    """Draw a text with each token shaded by its probability: the darker, the less likely.

    Args:
        checkpoint: a checkpoint file, a run folder or an imported folder; the newest run by default.
        text: what the model reads, at most its context length.
        output: the picture to write, .png or .svg, .gif with snapshots; probabilities.png or .gif by default.
        device: where the model runs; auto takes a GPU if there is one.
        overwrite: replace an existing picture.
        snapshots: animate it, with a frame for each snapshot of the run.
    """
    output = output or Path(f"probabilities.{'gif' if snapshots else 'png'}")
    check_free(output, overwrite)
    models = load_each(checkpoint, device, snapshots)
    read = [(step, *token_probabilities(model, tokenizer, text)) for step, model, tokenizer in models]
    figures = [shaded_text(found, labels, step) for step, found, labels in read]
    if snapshots:
        _animate(figures, output)
    else:
        save(figures[0], output)
    print(f"{output} shows {len(read[0][2])} tokens{f' in {len(read)} frames' * snapshots}")


def token_probabilities(model: GPT, tokenizer: Tokenizer, text: str) -> tuple[list[float], list[str]]:
    """The probability of each token given those before it, `<|endoftext|>` first, and a label for each."""
    ids, labels = labelled_tokens(tokenizer, text, model.config.context_length)
    rows = torch.tensor([[tokenizer.eot, *ids]])  # (1, T + 1)
    nats = score(model, rows[:, :-1], rows[:, 1:])  # (1, T)
    return (-nats[0]).exp().tolist(), labels


def boxes(labels: list[str], colours: Iterable[Any]) -> Figure:
    """The tokens in reading order, a box behind each, and 0.95 inches below them. A line end ends a row."""
    places, row, column = [], 0, 0
    for label in labels:
        if column and column + len(label) > COLUMNS:
            row, column = row + 1, 0
        places.append((row, column))
        column += len(label)
        if label.endswith("\u21b5"):
            row, column = row + 1, 0
    rows = row + (column > 0)
    width, height = COLUMNS * _COLUMN_INCHES + 0.4, rows * _ROW_INCHES + 1.2
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0.2 / width, 0.95 / height, 1 - 0.4 / width, rows * _ROW_INCHES / height))
    axes.set(xlim=(0, COLUMNS), ylim=(rows, 0))
    axes.axis("off")
    font = {"family": "DejaVu Sans Mono", "size": _FONT_SIZE}
    for colour, label, (row, column) in zip(colours, labels, places, strict=True):
        axes.add_patch(Rectangle((column, row + 0.06), len(label), 0.88, facecolor=colour, edgecolor="white"))
        axes.text(column, row + 0.5, label, fontdict=font, va="center", parse_math=False)
    return figure


def shaded_text(found: list[float], labels: list[str], step: str = "") -> Figure:
    """The tokens, each on the shade of its probability; below them a scale of the shades, and the step."""
    # One hue from light to dark needs no colour vision; black letters are legible on the darkest shade.
    shades = ListedColormap(colormaps["Oranges"](np.linspace(0.7, 0.0, 256)))
    scale = ScalarMappable(LogNorm(1e-4, 1.0, clip=True), shades)
    figure = boxes(labels, scale.to_rgba(np.array(found)))
    height = figure.get_figheight()
    bar = figure.add_axes((0.25, 0.52 / height, 0.5, 0.14 / height))
    figure.colorbar(scale, cax=bar, orientation="horizontal", ticks=[1e-4, 1e-3, 1e-2, 0.1, 1.0])
    bar.set_xticklabels(["1/10,000 or less", "1/1,000", "1/100", "1/10", "1"])
    bar.set_xlabel("probability of the token given those before it")
    note = f"{step}\n{-np.log(found).mean():.2f} nats per token" if step else ""
    figure.text(0.985, 0.52 / height, note, ha="right", va="center")
    return figure


def _animate(figures: Sequence[Figure], path: Path) -> None:
    """Write figures of one size as the frames of a GIF; InputError for another name."""
    if path.suffix.lower() != ".gif":
        raise InputError(f"cannot animate {path}: expected a name that ends in .gif")
    from PIL import Image

    frames = []
    for figure in figures:
        figure.savefig(drawn := io.BytesIO(), dpi=100)
        frames.append(Image.open(drawn).convert("RGB").quantize(dither=Image.Dither.NONE))
    times = [400] * (len(frames) - 1) + [2000]  # milliseconds
    with atomic_write(path, "wb") as file:
        frames[0].save(file, "GIF", save_all=True, append_images=frames[1:], duration=times, loop=0)
