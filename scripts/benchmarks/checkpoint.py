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
from gpt.run.resume import find
from gpt.run.save import AtomicCheckpointIO


def run(quick: bool) -> Report:
    """Save and load in turn."""
    rounds = 1 if quick else 8
    saved = _checkpoint(GPTConfig(num_layers=1 if quick else 12))
    with tempfile.TemporaryDirectory(dir=".") as folder:
        ours, bare = Path(folder) / "ours.ckpt", Path(folder) / "bare.ckpt"
        candidates: dict[str, Callable[[], object]] = {
            "save, bare torch.save": lambda: torch.save(saved, bare),
            "save, torch.save and fsync": lambda: _durable(saved, bare),
            "save, this program": lambda: AtomicCheckpointIO().save_checkpoint(saved, ours),
            # Both load the same file, because saving ours drops its pages from memory.
            "load, bare torch.load": lambda: torch.load(bare, weights_only=True),
            "load, this program": lambda: _resume(bare),
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


def _checkpoint(config: GPTConfig) -> dict[str, Any]:
    model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return {
        "state_dict": {f"model.{name}": tensor for name, tensor in model.state_dict().items()},
        "optimizer_states": [optimizer.state_dict()],
        "gpt": {"config": config.to_dict()},
        "run": {"options": "{}"},
        "global_step": 1,
    }


def _durable(saved: dict[str, Any], path: Path) -> None:
    """torch.save followed by fsync, so that the file is on the disk."""
    torch.save(saved, path)
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _resume(path: Path) -> dict[str, Any]:
    found = find(str(path))
    assert found is not None
    return AtomicCheckpointIO(checked=found.path).load_checkpoint(found.path)
