"""Checkpoints that say something else than their run wrote, whole and with a right checksum."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from gpt.weights.checkpoint import _checksum, read, write


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


def with_run(path: Path, to: Path, changes: dict[str, Any]) -> Path:
    """The checkpoint at `path` with any values as JSON in its header, and the checksum of the result."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    texts = header["__metadata__"]
    texts["run"] = json.dumps({**json.loads(texts["run"]), **changes})
    texts["checksum"] = _checksum(read(path).tensors, texts)
    text = json.dumps(header).encode()
    to.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    return to
