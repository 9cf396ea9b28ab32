"""A fingerprint that two runs of `gpt fit` share if and only if they trained identically."""

import csv
import hashlib
from pathlib import Path

import torch

from gpt.weights.checkpoint import read


def fingerprint(run: Path) -> tuple[str, list[dict[str, str]]]:
    """A hash of everything that the run's last checkpoint restores, and its metrics without the timings."""
    saved = read(run / "checkpoints" / "last.safetensors")
    assert saved.run is not None
    digest = hashlib.sha256(f"{saved.run.step} {saved.run.place}".encode())
    for name, tensor in sorted(saved.tensors.items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    with (run / "metrics.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        del row["seconds"], row["tokens_per_second"]
    return digest.hexdigest(), rows
