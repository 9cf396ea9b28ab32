"""Tiny runs of `gpt fit`, and what they end with."""

import csv
from pathlib import Path

import lightning.pytorch as pl
import pytest
from faults.fingerprint import fingerprint

from gpt.cli import main

TINY = [
    *("fit", "--data.corpus", "text.txt", "--trainer.logger", "csv", "--trainer.accelerator", "cpu"),
    *("--trainer.precision", "32-true", "--model.compile", "false", "--model.config.dropout", "0.2"),
    *("--data.vocabulary", "null", "--model.config.vocab_size", "300"),
    *("--model.config.context_length", "16", "--log_every", "4"),
    *("--model.config.emb_dim", "32", "--model.config.num_heads", "2", "--model.config.num_layers", "1"),
    *("--data.batch_size", "37", "--trainer.accumulate_grad_batches", "2"),
    *("--trainer.val_check_interval", "7", "--trainer.max_steps", "20"),
]
TEXT = "The quick brown fox jumps over the lazy dog.\n" * 300


def trainer(**options) -> pl.Trainer:
    """A plain Trainer that leaves nothing behind."""
    return pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        **options,
    )


def fit(*options: str) -> int:
    """`gpt fit` on the tiny run."""
    return main([*TINY, *options])


def run_in(folder: Path, *options: str) -> Path:
    """The tiny run as `folder`/runs/whole, and a text beside it."""
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert fit("--run", "whole", *options) == 0
    return folder / "runs" / "whole"


def rows(run: Path | str) -> list[dict[str, str]]:
    """Those of metrics.csv of a run, or of the one of this name in the current folder."""
    text = Path("runs", run, "metrics.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


def result(run: Path) -> tuple[str, list[dict[str, str]], str]:
    """All that the run's last checkpoint restores, as a hash, its metrics, its samples."""
    return *fingerprint(run), (run / "samples.txt").read_text(encoding="utf-8")
