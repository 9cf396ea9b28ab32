"""A fingerprint that two runs of `gpt fit` share if and only if they trained identically."""

import csv
import hashlib
from pathlib import Path
from typing import Any

import torch

from gpt.weights.checkpoint import read


def fingerprint(run: Path) -> tuple[str, list[dict[str, str]]]:
    """A hash of everything that the run's last checkpoint restores, and its metrics without the timings."""
    saved = read(run / "checkpoints" / "last.ckpt")
    digest = hashlib.sha256()
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "processes", "global_step"):
        _hash(saved[part], digest)
    with (run / "metrics.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        del row["seconds"], row["tokens_per_second"]
    return digest.hexdigest(), rows


def _hash(value: Any, digest: Any) -> None:
    if isinstance(value, torch.Tensor):
        digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for key, part in value.items():
            digest.update(repr(key).encode())
            _hash(part, digest)
    elif isinstance(value, list | tuple):
        for part in value:
            _hash(part, digest)
    else:
        digest.update(repr(value).encode())
