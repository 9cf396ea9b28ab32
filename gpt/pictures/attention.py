"""`gpt attention`: draw a heat map of each head's attention weights, and an overview of all heads.

Shapes: L layers, H heads, T tokens.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from numpy.typing import ArrayLike, NDArray

from gpt.attention.capture import capture_weights
from gpt.errors import InputError
from gpt.files import check_free
from gpt.model import GPT
from gpt.pictures.figures import drawable, save, token_label
from gpt.progress import progress
from gpt.text.tokenizer import Tokenizer
from gpt.weights.load import Device, load

MOST_LABELS = 64  # labels on an axis; with more tokens, only every second, third, ... label is written
MOST_IN_OVERVIEW = 12  # labels beside its small maps; with more tokens, it has none


def attention_maps(
    checkpoint: str | None = None,
    text: str = "",
    output: Path = Path("attention"),
    device: Device = "auto",
) -> None:
    """Draw where each head of a trained GPT attends while it reads a text.

    Writes `layer-LL-head-HH.png`, numbered from 00, for each layer and head, and `overview.png` with
    all layers and heads side by side.

    Args:
        checkpoint: a run, a checkpoint, an exported or imported folder, gpt2 or OWNER/NAME on the hub; by
            default the newest run.
        text: what the model reads, at most its context length.
        output: the folder for the pictures, new or empty.
        device: where the model runs; auto takes a GPU if there is one.
    """
    check_free(output)
    weights, labels = attention_weights(*load(checkpoint, device), text)
    num_layers, num_heads = weights.shape[:2]
    begin = drawable(" ".join(text.split()))
    most = min(60, 10 * num_heads)  # more heads, wider picture
    if len(begin) > most:
        begin = f"{begin[: most - 1]}…"
    save(overview(weights, labels, f'Attention in "{begin}"'), output / "overview.png")
    with progress("drawing", num_layers * num_heads, unit="pictures") as advance:
        for i, j in np.ndindex(num_layers, num_heads):
            figure = heat_map(weights[i, j], labels, f"Layer {i}, head {j}")
            save(figure, output / f"layer-{i:02}-head-{j:02}.png")
            advance(1)
    print(f"{num_layers * num_heads} heat maps, and overview.png with all of them, are in {output}")


def attention_weights(model: GPT, tokenizer: Tokenizer, text: str) -> tuple[NDArray[np.float32], list[str]]:
    """Return the attention weights (L, H, T, T) of a model that reads a text, and a label for each token.

    Raises InputError if the text is empty or longer than the context.
    """
    ids = tokenizer.encode(text)
    if not ids:
        raise InputError("there is no text to read: give one with --text")
    with torch.inference_mode(), capture_weights(model) as captured:
        model.features(torch.tensor([ids], device=model.token_embedding.weight.device))
    labels = [token_label(tokenizer.decode_bytes([i])) for i in ids]
    return torch.cat(list(captured.values())).float().cpu().numpy(), labels


def heat_map(weights: ArrayLike, labels: Sequence[str], title: str) -> Figure:
    """Draw one head's weights (T, T): a row for each query, a column for each key, labelled by token."""
    size = min(max(4.0, 1.5 + 0.28 * len(labels)), 18.0)
    figure = Figure(figsize=(size + 1.0, size), layout="constrained")
    axes = figure.add_subplot()
    image = _draw(axes, weights)
    step = math.ceil(len(labels) / MOST_LABELS)
    positions = range(0, len(labels), step)
    axes.set_xticks(positions, labels[::step], rotation=90, parse_math=False)
    axes.set_yticks(positions, labels[::step], parse_math=False)
    axes.tick_params(length=0, labelsize=8)
    axes.set(title=title, xlabel="attends to", ylabel="token")
    figure.colorbar(image, ax=axes, label="attention weight", shrink=0.8)
    return figure


def overview(weights: NDArray[np.float32], labels: Sequence[str], title: str) -> Figure:
    """Draw all heads' weights (L, H, T, T) in one grid: a row for each layer, a column for each head.

    The labels of few tokens stand at the grid's left and bottom.
    """
    num_layers, num_heads = weights.shape[:2]
    figure = Figure(figsize=(1.2 * num_heads + 1.8, 1.2 * num_layers + 1.4), layout="constrained")
    grid = figure.subplots(num_layers, num_heads, squeeze=False, sharex=True, sharey=True)
    for (i, j), axes in np.ndenumerate(grid):
        image = _draw(axes, weights[i, j])
        axes.tick_params(length=0, labelsize=7)
    if len(labels) > MOST_IN_OVERVIEW:
        labels = []
    places = range(len(labels))
    for axes in grid[-1]:
        axes.set_xticks(places, labels, rotation=90, parse_math=False)
    for axes in grid[:, 0]:
        axes.set_yticks(places, labels, parse_math=False)
    for j, axes in enumerate(grid[0]):
        axes.set_title(f"head {j}", fontsize=9)
    for i, axes in enumerate(grid[:, 0]):
        axes.set_ylabel(f"layer {i}", fontsize=9)
    figure.suptitle(title, parse_math=False)
    figure.colorbar(image, ax=grid, label="attention weight", aspect=40, fraction=0.02)
    return figure


def _draw(axes: Axes, weights: ArrayLike) -> AxesImage:
    """Draw weights (T, T). Masked cells are grey, weights of zero white.

    The colour scale is a square root, so that the many small weights can be told apart.
    """
    weights = np.asarray(weights)
    later = np.triu(np.ones_like(weights, dtype=bool), k=1)
    axes.set_facecolor("#e4e4e4")
    shown = np.ma.masked_where(later & (weights == 0), weights)
    return axes.imshow(shown, cmap="Blues", norm=PowerNorm(0.5, 0.0, 1.0), interpolation="nearest")
