"""Pictures of what a GPT's heads look at: a labelled heat map of each, and an overview of all."""

import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gpt.errors import InputError
from gpt.files import atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

    from gpt.model import GPT
    from gpt.tokenizer import Tokenizer

# The square root spreads the many small weights: most heads give most of their weight to one token. Grey is
# what the causal mask hides, white what a head may look at and does not.
COLOURS, POWER, HIDDEN = "Blues", 0.5, "#e4e4e4"
# More labels than this on an axis run into one another: then every second, third, ... is written.
MOST_LABELS = 64


def attention_maps(
    checkpoint: str | None = None,
    text: str = "",
    layer: str = "all",
    head: str = "all",
    output: str = "attention",
) -> None:
    """Draw what each head of a trained GPT looks at while it reads a text.

    Writes `layer-LL-head-HH.png`, counted from 00, for each layer and head chosen, and `overview.png` with
    all layers and heads side by side.

    Args:
        checkpoint: a checkpoint file, a run's folder or an exported one; the newest run if left out.
        text: what the model reads, at most its context.
        layer: "all", or a layer's number, 0 for the first.
        head: "all", or a head's number, 0 for the first.
        output: the folder for the pictures, new or empty.

    Raises:
        InputError: there is no such checkpoint, layer or head, the text is empty or longer than the context,
            or the folder holds files.
    """
    if not text:
        raise InputError("there is no text to read, name one with --text")
    folder = Path(output)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} is there and not an empty folder, name another --output")

    from gpt.weights.load import load

    model, tokenizer = load(checkpoint)
    layers = _chosen("layer", layer, model.config.num_layers)
    heads = _chosen("head", head, model.config.num_heads)
    weights, labels = read_weights(model, tokenizer, text)
    pictures = [(i, j) for i in layers for j in heads]
    save(overview(weights, f"Attention to {_shortened(text)}"), folder / "overview.png")
    for i, j in _progress(pictures, "drawing"):
        save(
            heat_map(weights[i, j], labels, f"Layer {i}, head {j}"), folder / f"layer-{i:02}-head-{j:02}.png"
        )
    print(f"{len(pictures)} heat maps and overview.png are in {folder}")


def read_weights(model: "GPT", tokenizer: "Tokenizer", text: str) -> tuple[NDArray[np.float32], list[str]]:
    """The attention weights (layers, heads, T, T) of `model` reading `text`, and a label for each token.

    Raises:
        InputError: the text is longer than the context.
    """
    import torch

    from gpt.attention.capture import capture_weights

    ids = tokenizer.encode(text)
    if len(ids) > model.config.context_length:
        raise InputError(
            f"the text is {len(ids)} tokens, the model reads at most {model.config.context_length}"
        )
    device = next(model.parameters()).device
    with torch.inference_mode(), capture_weights(model) as captured:
        model.features(torch.tensor([ids], device=device))
    weights = torch.stack([layer[0] for layer in captured.values()])  # (layers, heads, T, T)
    return weights.float().cpu().numpy(), [token_label(tokenizer.decode_bytes([i])) for i in ids]


def token_label(token: bytes) -> str:
    """A token's bytes as a person can read them: spaces and line ends visible, half characters in hex.

    What the pictures' font lacks is written as its code point.
    """
    try:
        text = token.decode("utf-8")
    except UnicodeDecodeError:
        return token.hex(" ")
    visible = {" ": "·", "\n": "\u21b5", "\t": "\u2192", "\r": "\u240d"}
    text = "".join(visible.get(character, character) for character in text)
    return "".join(
        character
        if character.isprintable() and ord(character) in _characters()
        else f"U+{ord(character):04X}"
        for character in text
    )


def heat_map(weights: ArrayLike, labels: Sequence[str], title: str) -> "Figure":
    """One head's weights (T, T), queries down, keys across, a label for each token on both axes."""
    size = min(max(4.0, 1.5 + 0.28 * len(labels)), 18.0)
    figure = _figure(size + 1.0, size)
    axes = figure.add_subplot()
    image = _draw(axes, weights)
    step = math.ceil(len(labels) / MOST_LABELS)
    positions, shown = range(0, len(labels), step), labels[::step]
    axes.set_xticks(positions, shown, rotation=90, parse_math=False)
    axes.set_yticks(positions, shown, parse_math=False)
    axes.tick_params(length=0, labelsize=9 if len(labels) <= 40 else 7)
    axes.set(title=title, xlabel="looks at", ylabel="token")
    figure.colorbar(image, ax=axes, label="attention weight", shrink=0.8)
    return figure


def overview(weights: NDArray[np.float32], title: str) -> "Figure":
    """All heads' weights (layers, heads, T, T) in one grid: a row for each layer, a column for each head."""
    num_layers, num_heads = weights.shape[:2]
    figure = _figure(1.0 * num_heads + 1.6, 1.0 * num_layers + 1.2)
    grid = figure.subplots(num_layers, num_heads, squeeze=False)
    for (i, j), axes in np.ndenumerate(grid):
        image = _draw(axes, weights[i, j])
        axes.set_xticks([])
        axes.set_yticks([])
        if i == 0:
            axes.set_title(f"head {j}", fontsize=9)
        if j == 0:
            axes.set_ylabel(f"layer {i}", fontsize=9)
    figure.suptitle(title, parse_math=False)
    figure.colorbar(image, ax=grid, label="attention weight", aspect=40, fraction=0.02)
    return figure


def save(figure: "Figure", path: Path) -> None:
    """Write a PNG."""
    with atomic_write(path, "wb") as file:
        figure.savefig(file, format="png", dpi=120)


def _figure(width: float, height: float) -> "Figure":
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _draw(axes: "Axes", weights: ArrayLike) -> "AxesImage":
    from matplotlib.colors import PowerNorm

    weights = np.asarray(weights)
    later = np.triu(np.ones_like(weights, dtype=bool), k=1)
    seen = np.ma.masked_where(later & (weights == 0), weights)
    axes.set_facecolor(HIDDEN)
    return axes.imshow(seen, cmap=COLOURS, norm=PowerNorm(POWER, 0.0, 1.0), interpolation="nearest")


@cache
def _characters() -> frozenset[int]:
    """The code points that matplotlib's own font has."""
    from matplotlib.font_manager import findfont, get_font

    return frozenset(get_font(findfont("DejaVu Sans")).get_charmap())


def _chosen(name: str, choice: str, count: int) -> Iterable[int]:
    if choice == "all":
        return range(count)
    if not choice.isdecimal() or int(choice) >= count:
        raise InputError(f"there is no {name} {choice}, expected all or 0 to {count - 1}")
    return [int(choice)]


def _shortened(text: str, longest: int = 60) -> str:
    line = " ".join(text.split())
    return f'"{line if len(line) <= longest else line[: longest - 1] + "…"}"'


def _progress(pictures: Sequence[Any], label: str) -> Iterator[Any]:
    """A bar with the time left on a terminal, a rare plain line elsewhere; both on stderr."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import track

        yield from track(pictures, label, console=Console(stderr=True))
        return
    last = time.monotonic()
    for done, picture in enumerate(pictures):
        yield picture
        if time.monotonic() - last > 15:
            last = time.monotonic()
            print(f"{label}: {done + 1} of {len(pictures)}", file=sys.stderr, flush=True)
