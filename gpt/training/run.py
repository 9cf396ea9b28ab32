"""A run's folder, and what is written into it while training goes on.

runs/NAME/config.yaml       every option, resolved
          checkpoints/      best.ckpt, last.ckpt
          metrics.csv       a row a logging interval or validation
          loss.png          the same as a picture
          samples.txt       a text at each validation
          summary.json      how it ended
"""

import csv
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

from gpt import plot
from gpt.checkpoint import RUNS
from gpt.errors import InputError
from gpt.files import atomic_write, write_json

COLUMNS = (
    "step",
    "tokens",
    "seconds",
    "train_loss",
    "learning_rate",
    "tokens_per_second",
    "val_loss",
    "val_perplexity",
    "val_bits_per_byte",
)


def new_folder(name: str) -> Path:
    """`runs/NAME`, or the first of `runs/NAME-2`, `runs/NAME-3`, ... that is not there yet.

    Raises:
        InputError: the name is not that of a folder.
    """
    if not name or name.startswith(".") or set(name) & set("/\\"):
        raise InputError(f"expected a plain folder name for --run, got {name!r}")
    folder, number = RUNS / name, 1
    while folder.exists():
        number += 1
        folder = RUNS / f"{name}-{number}"
    return folder


class MetricsCSV(Logger):
    """metrics.csv, written anew and atomically at each `save`.

    Lightning's CSVLogger deletes the file of the run that is resumed, and adds a column for each name it is
    given; here the columns are known.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.path = folder / "metrics.csv"
        self.rows: list[dict[str, float]] = []

    @property
    def name(self) -> str:
        """The run's name."""
        return self.path.parent.name

    @property
    def version(self) -> str:
        """Empty: a run's folder is its only version."""
        return ""

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing: the run's config.yaml has them."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Keep a row; unknown names are left out."""
        row = {name: metrics[name] for name in COLUMNS if name in metrics}
        self.rows.append({"step": step or 0, **row})

    @rank_zero_only
    def save(self) -> None:
        """Write all rows, once there is one: a run that never began leaves nothing behind."""
        if not self.rows:
            return
        with atomic_write(self.path) as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows({name: _shortest(value) for name, value in row.items()} for row in self.rows)


class Meter(Callback):
    """Measures loss, learning rate and speed once in `every` steps, and hands them to the loggers.

    The losses in between are added up on the device: reading one would wait for it.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self.steps = self.tokens = self.interval_batches = self.interval_tokens = 0
        self.seconds = self.train_seconds = 0.0
        self.loss_sum: torch.Tensor | float = 0.0
        self.train_loss = self.tokens_per_second = float("nan")
        self.last_validation: dict[str, float] = {}
        self._started = self._interval_started = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clocks."""
        self._started = self._interval_started = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count a batch, and at the end of an interval log it."""
        self.loss_sum = self.loss_sum + pl_module.last_loss  # type: ignore[operator]
        self.interval_batches += 1
        self.interval_tokens += batch[0].numel() * trainer.world_size
        if trainer.global_step == self.steps:  # gradients accumulate, no update yet
            return
        self.steps = trainer.global_step
        if self.steps % self.every and self.steps != pl_module.planned_steps:
            return
        self.train_loss = float(self.loss_sum) / self.interval_batches
        now = time.perf_counter()
        self.tokens += self.interval_tokens
        self.tokens_per_second = self.interval_tokens / (now - self._interval_started)
        self.seconds = now - self._started
        self._log(
            trainer,
            train_loss=self.train_loss,
            learning_rate=trainer.optimizers[0].param_groups[0]["lr"],
            tokens_per_second=self.tokens_per_second,
        )
        self.loss_sum, self.interval_batches, self.interval_tokens = 0.0, 0, 0
        self._interval_started = now

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log what validation found, and draw the curve."""
        names = [name for name in COLUMNS if name.startswith("val_") and name in trainer.callback_metrics]
        self.last_validation = {name: float(trainer.callback_metrics[name]) for name in names}
        self._log(trainer, **self.last_validation)
        for logger in trainer.loggers:
            logger.save()
        self._interval_started = time.perf_counter()  # validation is no part of the training speed

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock."""
        self.train_seconds = time.perf_counter() - self._started

    def _log(self, trainer: Trainer, **metrics: float) -> None:
        metrics = {**metrics, "tokens": self.tokens, "seconds": self.seconds}
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)


class ValidateAtEnd(Callback):
    """Has the last step validated too, whatever the interval, so that the best checkpoint can be the last."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Ask to stop where training stops anyway: Lightning validates before it stops on request."""
        if trainer.global_step >= pl_module.planned_steps:  # type: ignore[operator]
            trainer.should_stop = True


class Samples(Callback):
    """Writes a short text at each validation, to see what the numbers mean."""

    def __init__(self, folder: Path, max_new_tokens: int = 64, temperature: float = 0.8) -> None:
        self.path = folder / "samples.txt"
        self.max_new_tokens = max_new_tokens
        self.temperature = temperature
        self.texts: list[str] = []
        self.newest = ""

    @rank_zero_only
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Continue an empty document from one seed throughout, so that the texts can be compared."""
        from gpt.generate import stream_text

        tokenizer = trainer.datamodule.tokenizer  # type: ignore[attr-defined]
        pieces = stream_text(
            pl_module.model,  # type: ignore[arg-type]
            tokenizer,
            "",
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_k=50,
            seed=0,
        )
        self.newest = "".join(pieces).strip()
        self.texts.append(f"--- step {trainer.global_step}\n{self.newest}\n")
        with atomic_write(self.path) as file:
            file.write("\n".join(self.texts))


def write_summary(folder: Path, trainer: Trainer, parameters: int, meter: Meter) -> dict[str, Any]:
    """Write and return summary.json: how the run ended; sizes in bytes, times in seconds."""
    device = trainer.strategy.root_device
    summary = {
        "val_bits_per_byte": meter.last_validation.get("val_bits_per_byte"),
        "val_loss": meter.last_validation.get("val_loss"),
        "train_seconds": round(meter.train_seconds, 2),
        "steps": trainer.global_step,
        "tokens": meter.tokens,
        "tokens_per_second": round(meter.tokens / max(meter.train_seconds, 1e-9)),
        "peak_memory_bytes": peak_memory_bytes(device),
        "parameters": parameters,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "precision": str(trainer.precision),
    }
    write_json(folder / "summary.json", summary)
    return summary


def draw_loss_curve(folder: Path) -> None:
    """loss.png from metrics.csv."""
    plot.loss_curve(folder / "metrics.csv", folder / "loss.png", title=f"Loss of {folder.name}")


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory this process held: on the GPU where it trains there, else in RAM."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return 0  # the standard library cannot tell
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


def _shortest(value: float) -> str:
    return f"{value:.8g}"
