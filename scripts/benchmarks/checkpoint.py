"""`benchmark.py checkpoint`: the cost of atomic writes and checksums, beside torch.save and torch.load.

GPT-2 small with AdamW's states, 1.5 GB. Pending disk writes are flushed before each measurement.
"""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benchmarks.common import Report, interleave, say

from gpt import GPT, GPTConfig
from gpt.run.checkpoint import save
from gpt.weights.checkpoint import ModelPart, RunPart, read


def run(quick: bool) -> Report:
    """Save and load in turn."""
    rounds = 1 if quick else 8
    config = GPTConfig(num_layers=1 if quick else 12)
    saved = _tensors(config)
    parts = _parts(config)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        ours, bare = Path(folder) / "ours.safetensors", Path(folder) / "bare.ckpt"
        candidates: dict[str, Callable[[], object]] = {
            "save, bare torch.save": lambda: torch.save(saved, bare),
            "save, torch.save and fsync": lambda: _durable(saved, bare),
            "save, this program": lambda: save(ours, saved, *parts),
            "load, bare torch.load": lambda: torch.load(bare, weights_only=True),
            "load, this program": lambda: _load(ours),
        }
        say(f"saving and loading, {rounds} times each")
        timings = interleave(candidates, rounds, before=os.sync)
        size = ours.stat().st_size
    return Report(
        title=f"A checkpoint of {size / 1e9:.2f} GB",
        rows=[
            {"what": name, "seconds": timing.median, "spread": f"{timing.spread:.1%}"}
            for name, timing in timings.items()
        ],
        ratios={
            f"{way}_vs_bare_torch": timings[f"{way}, this program"].times_faster_than(
                timings[f"{way}, bare torch.{way}"]
            )
            for way in ("save", "load")
        }
        | {
            "save_vs_torch_and_fsync": timings["save, this program"].times_faster_than(
                timings["save, torch.save and fsync"]
            )
        },
        bars={"a checkpoint": {name: timing.median for name, timing in timings.items()}},
        unit="seconds",
        notes=["Saving includes fsync and the rename, loading the comparison of all checksums."],
    )


def _tensors(config: GPTConfig) -> dict[str, torch.Tensor]:
    """Weights, and as much again twice for the moments."""
    weights = GPT(config).state_dict()
    del weights["head.weight"]
    moments = {
        f"optimizer/{name}/{key}": torch.randn_like(weight)
        for name, weight in weights.items()
        for key in ("exp_avg", "exp_avg_sq")
    }
    return {**weights, **moments}


def _parts(config: GPTConfig) -> tuple[ModelPart, RunPart]:
    empty: dict[str, Any] = dict.fromkeys(("tokenizer", "bytes_per_token", "template", "adapters"))
    return ModelPart(config=config.to_dict(), **empty), RunPart(step=1, total=1)


def _durable(saved: dict[str, Any], path: Path) -> None:
    """torch.save followed by fsync, so that the file is on the disk."""
    torch.save(saved, path)
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _load(path: Path) -> dict[str, torch.Tensor]:
    """Read, check, and copy into memory."""
    return {name: tensor.clone() for name, tensor in read(path).tensors.items()}
