"""`benchmark.py checkpoint`: the cost of atomic writes and checksums, beside torch.save and torch.load.

GPT-2 small with AdamW's states, 1.5 GB. Pending disk writes are flushed before each measurement.
"""

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from benchmarks.common import Report, interleave, timed_rows

from gpt import GPT, GPTConfig
from gpt.files import atomic_write
from gpt.weights.checkpoint import ModelPart, read, write


def run(quick: bool) -> Report:
    """Save and load, interleaved."""
    config = GPTConfig(num_layers=1 if quick else 12)
    weights = GPT(config).state_dict()
    del weights["head.weight"]
    saved = {
        f"{part}{name}": torch.randn_like(weight)
        for part in ("", "optimizer/exp_avg/", "optimizer/exp_avg_sq/")
        for name, weight in weights.items()
    }
    empty: dict[str, Any] = dict.fromkeys(("tokenizer", "template", "adapters"))
    parts = ModelPart(config=config.to_dict(), **empty), None
    with tempfile.TemporaryDirectory(dir=".") as folder:
        ours, bare = Path(folder) / "ours.safetensors", Path(folder) / "bare.ckpt"

        def save() -> None:
            with atomic_write(ours, "wb") as file:
                write(file, saved, *parts)

        candidates = {
            "save, bare torch.save": lambda: torch.save(saved, bare),
            "save, this program": save,
            "load, bare torch.load": lambda: torch.load(bare, weights_only=True),
            "load, this program": lambda: [tensor.clone() for tensor in read(ours).tensors.values()],
        }
        taken = interleave(candidates, 1 if quick else 8, before=os.sync)
        size = ours.stat().st_size / 1e9
    save_ours = taken["save, this program"]
    return Report(
        title=f"A checkpoint of {size:.2f} GB",
        rows=timed_rows(taken, size, "GB/s"),
        ratios={
            "save_vs_bare_torch": save_ours.times_faster_than(taken["save, bare torch.save"]),
            "load_vs_bare_torch": taken["load, this program"].times_faster_than(
                taken["load, bare torch.load"]
            ),
        },
        notes=["Saving includes fsync and the rename, loading the comparison of all checksums."],
    )
