"""Tiny runs of `gpt fit`, and what they end with."""

import csv
import hashlib
from pathlib import Path
from typing import Any

import torch

from gpt.checkpoint import read
from gpt.cli import main

TINY = [
    *("fit", "--data.corpus", "text.txt", "--trainer.logger", "false", "--trainer.accelerator", "cpu"),
    *("--trainer.precision", "32-true", "--model.compile", "false", "--model.config.dropout", "0.2"),
    *("--model.config.vocab_size", "300", "--model.config.context_length", "16", "--log_every", "4"),
    *("--model.config.emb_dim", "32", "--model.config.num_heads", "2", "--model.config.num_layers", "1"),
    *("--data.batch_size", "37", "--trainer.accumulate_grad_batches", "2"),
    *("--trainer.val_check_interval", "14", "--trainer.max_steps", "20"),
]
TEXT = "The quick brown fox jumps over the lazy dog.\n" * 300


def fit(*options: str) -> int:
    """`gpt fit` on the tiny run."""
    return main([*TINY, *options])


def result(run: Path) -> tuple[str, list[dict[str, str]], str]:
    """A hash of all that the run's last checkpoint restores, its metrics but for the clocks, its samples."""
    saved = read(run / "checkpoints" / "last.ckpt")
    digest = hashlib.sha256()
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "processes", "global_step"):
        _hash(saved[part], digest)
    with (run / "metrics.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        del row["seconds"], row["tokens_per_second"]
    return digest.hexdigest(), rows, (run / "samples.txt").read_text(encoding="utf-8")


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
