"""Write a file that runs a model in any browser: a page, a description of the model, weights in base64."""

import gzip
import math
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from gpt.errors import InputError
from gpt.files import atomic_write
from gpt.progress import counted
from gpt.share.page import page_of
from gpt.text.table import LAST_WORD, WORDS, pack
from gpt.weights.checkpoint import RunPart
from gpt.weights.figures import figures_of
from gpt.weights.formats.table import Weights
from gpt.weights.load import StoredModel, read_weights
from gpt.weights.rounding import to_int8
from gpt.weights.runs import Snapshot, most_crowded

PagePrecision = Literal["int8", "float16", "float32"]
LARGEST = 300_000_000  # bytes; the largest file
MEGABYTES = 8.0  # of snapshots, by default
_BLOCK = 3 << 20  # bytes of weights that the page decodes at a time
_LANES = 16  # numbers that the page's loops take at a time: `LANES` in model.js, columns in kernel.js


def write(
    path: Path,
    stored: StoredModel,
    *,
    name: str,
    precision: PagePrecision = "int8",
    snapshots: Sequence[Snapshot] = (),
    megabytes: float = MEGABYTES,
    text: NDArray[np.uint32] | None = None,
    run: RunPart | None = None,
) -> str:
    """Write a cropped model, and return a line that says what is in the file.

    Args:
        path: the file.
        stored: the model.
        name: what the page calls it.
        precision: the precision of the weights in the file.
        snapshots: those of the model's run. As many are written as fit into `megabytes`, but none if two
            would not fit. They are evenly spaced in the logarithm of the step.
        megabytes: the most space for snapshots, in MB.
        text: the ids of the training text, if the page is to find what was copied from it.
        run: the state of the run, for the page to show its figures.

    Raises:
        InputError: the file would be larger than `LARGEST`, or a snapshot is one of another model.
    """
    data, tensors = _packed(stored.weights, precision)
    chosen = list(snapshots)
    most = megabytes * 750_000 / len(data)  # base64 has 4 bytes for 3
    while len(chosen) > max(most, 2):
        del chosen[most_crowded(chosen)]
    models: list[dict[str, float | None]] = [{"step": None}]
    for step, loss, file in chosen if most >= 2 else []:
        models.append({"step": step, "loss": loss if math.isfinite(loss) else None})
        data += _packed(_weights_of_snapshot(file, stored), precision)[0]
    # gzip detects damage, and makes int8 weights a little smaller.
    blocks = [gzip.compress(data[start : start + _BLOCK], 1) for start in range(0, len(data), _BLOCK)]
    description = {
        "name": name,
        "config": stored.config.to_dict(),
        "figures": figures_of(stored.num_parameters(), run),
        "template": asdict(stored.template) if stored.template else None,
        "table": pack(stored.tokenizer.tokens),
        "words": _in_javascript(WORDS),
        "last_word": _in_javascript(LAST_WORD),
        "text": None if text is None else _letters(text),
        "precision": precision,
        "tensors": tensors,
        "models": models,
        "bytes": len(data),
        "blocks": len(blocks),
    }
    content = page_of(description, [b64encode(block).decode() for block in blocks]).encode()
    size = f"{len(content) / 1e6:,.1f} MB"
    if len(content) > LARGEST:
        advice = "take int8, --snapshot_megabytes 0 and no text, or train a smaller model"
        raise InputError(f"the file would have {size}, more than {LARGEST / 1e6:.0f}: {advice}")
    with atomic_write(path, "wb") as output:
        output.write(content)
    snapshots_inside = counted(len(models) - 1, "snapshot")
    return f"{path} has {size}: the model in {precision} and {snapshots_inside} of its training"


def _weights_of_snapshot(file: Path, model: StoredModel) -> Weights:
    """Read the weights of a snapshot; InputError unless it has the shape and the tokens of the model."""
    snapshot = read_weights(file).cropped()
    same_shape = snapshot.config.with_dropout_of(model.config) == model.config
    if not same_shape or snapshot.tokenizer != model.tokenizer:
        raise InputError(f"{file} has another shape or vocabulary than the model: move it out of the run")
    return snapshot.weights


def _packed(weights: Weights, precision: PagePrecision) -> tuple[bytes, dict[str, list[int]]]:
    """Return the weights as bytes, and each tensor's offset in them and numbers of rows and columns.

    Rows are padded to a multiple of `_LANES`. The scales of an int8 matrix follow it.
    """
    tensors = {}
    parts = list[bytes]()
    end = 0
    for name, values in weights.items():
        rows = values.shape[0] if values.dim() == 2 else 1
        tensors[name] = [end, rows, values.shape[-1]]
        stored = [values.to(torch.float16 if precision == "float16" else torch.float32)]
        if precision == "int8" and values.dim() == 2:
            stored = list(to_int8(values))
        for tensor in stored:
            parts.append(F.pad(tensor, (0, -tensor.shape[-1] % _LANES)).numpy().tobytes())
            end += len(parts[-1])
    return b"".join(parts), tensors


def _letters(ids: NDArray[np.uint32]) -> str:
    """Write the ids as a text, one letter for each. It skips surrogates, as these are no letters."""
    return np.where(ids < 0xD800, ids, ids + 0x800).astype("<u2").tobytes().decode("utf-16-le")


def _in_javascript(words: str) -> str:
    """Convert a regular expression of tiktoken to JavaScript with the flag `v`.

    JavaScript has no possessive repetitions, but here ordinary ones match the same. Its `\\s` matches other
    characters, so `White_Space` replaces it.
    """
    return words.replace("++", "+").replace(r"\s", r"\p{White_Space}").replace(r"\S", r"\P{White_Space}")
