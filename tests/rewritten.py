"""Checkpoints that say something else than their run wrote, whole and with a right checksum."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from gpt.weights.checkpoint import read, write


def rewritten(
    path: Path | str,
    to: Path | str,
    model: dict[str, Any] | None = None,
    run: dict[str, Any] | None = None,
    tensors: dict[str, Tensor | None] | None = None,
) -> Path:
    """The checkpoint at `path` written to `to`, with other fields and tensors, without those of None."""
    saved, to = read(path), Path(to)
    assert saved.run is not None
    found = {**{name: tensor.clone() for name, tensor in saved.tensors.items()}, **(tensors or {})}
    kept = {name: tensor for name, tensor in found.items() if tensor is not None}
    changed = replace(saved.model, **(model or {})), replace(saved.run, **(run or {}))
    del saved
    to.parent.mkdir(parents=True, exist_ok=True)
    with to.open("wb") as file:
        write(file, kept, *changed)
    return to
