"""Checkpoints that say something else than their run wrote, whole and with a right checksum."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from gpt.weights.checkpoint import _checksum, _sums, read, write


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
    changed = {**{name: tensor.clone() for name, tensor in saved.tensors.items()}, **(tensors or {})}
    kept = {name: tensor for name, tensor in changed.items() if tensor is not None}
    parts = replace(saved.model, **(model or {})), replace(saved.run, **(run or {}))
    del saved
    to.parent.mkdir(parents=True, exist_ok=True)
    with to.open("wb") as file:
        write(file, kept, *parts)
    return to


def retold(path: Path | str, to: Path | str, old: str, new: str, **texts: str) -> Path:
    """The file at `path` with `new` for `old` in the texts of its header, whatever that means to a reader.

    The `texts` take the place of others in the header, or are added to them.
    """
    data, to = Path(path).read_bytes(), Path(to)
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    told = header["__metadata__"]
    for name in ("model", "run"):
        told[name] = told[name].replace(old, new)
    told |= texts
    told["checksum"] = _checksum(told, _sums(load_file(path)))
    changed = json.dumps(header).encode()
    changed += b" " * (-len(changed) % 8)
    to.write_bytes(len(changed).to_bytes(8, "little") + changed + data[end:])
    return to
