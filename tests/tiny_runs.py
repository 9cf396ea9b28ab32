"""Tiny runs of `gpt fit`, what they end with, and what a kill leaves of them."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from faults.fingerprint import fingerprint

from gpt.cli import main
from gpt.weights.checkpoint import Checkpoint, read

COMMAND = """fit --data.corpus text.txt --data.vocabulary null --data.batch_size 37
--model.config.vocab_size 300 --model.config.context_length 16 --model.config.emb_dim 32
--model.config.num_heads 2 --model.config.num_layers 1 --model.config.dropout 0.2 --model.compile false
--trainer.accelerator cpu --trainer.precision 32-true --trainer.logger csv --log_every 4
--trainer.accumulate_grad_batches 2 --trainer.val_check_interval 7 --trainer.max_steps 20"""
TINY = COMMAND.split()
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


class Gradients(pl.Callback):
    """Keeps the gradients (P,) of all parameters after the last batch, as the optimizer got them."""

    last: torch.Tensor

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        self.last = torch.cat([weight.grad.flatten() for weight in module.parameters()])


def gpt(command: str) -> int:
    """Run `gpt COMMAND`, whose words contain no blanks, and return its exit status."""
    return main(command.split())


def fit(*options: str) -> int:
    """Run `gpt fit` on the tiny run with these options, which may stand in one text."""
    return main([*TINY, *" ".join(options).split()])


def run_in(folder: Path, *options: str) -> Path:
    """The tiny run as `folder`/runs/whole, and a text beside it."""
    (folder / "text.txt").write_text(TEXT, "utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert fit("--run", "whole", *options) == 0
    return folder / "runs" / "whole"


def folder_of(run: Path | str) -> Path:
    """The folder of a run; a text is the name of a run in the current folder."""
    return run if isinstance(run, Path) else Path("runs", run)


def rows(run: Path | str) -> list[dict[str, str]]:
    """The rows of a run's metrics.csv."""
    with (folder_of(run) / "metrics.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def checkpoint(run: Path | str, name: str = "last") -> Checkpoint:
    """A checkpoint of a run."""
    return read(folder_of(run) / "checkpoints" / f"{name}.safetensors")


def summary(run: Path | str) -> dict[str, Any]:
    """A run's summary.json."""
    return json.loads((folder_of(run) / "summary.json").read_text("utf-8"))


def result(run: Path | str) -> tuple[str, list[dict[str, str]], str]:
    """All that a run's last checkpoint restores, as a hash, its metrics, its samples."""
    folder = folder_of(run)
    return *fingerprint(folder), (folder / "samples.txt").read_text("utf-8")


def contents(folder: Path) -> dict[Path, bytes]:
    """All files of a folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def killed(whole: Path, step: int) -> Path:
    """The run `whole` as `runs/cut`, where a kill has left the checkpoint of `step` and later rows."""
    run = Path("runs/cut")
    shutil.copytree(whole, run, ignore=shutil.ignore_patterns("checkpoints", "summary.json"))
    (run / "checkpoints").mkdir()
    saved = whole / "checkpoints" / f"step-{step}.safetensors"
    shutil.copy(saved, run / "checkpoints" / "last.safetensors")
    return run
