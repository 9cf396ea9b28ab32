"""metrics.csv, and the figures in it.

A resumed run continues these files: what was written after its checkpoint is cut off first.
"""

import csv
import io
import time
from importlib.util import find_spec
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

from gpt.errors import InputError
from gpt.files import atomic_write
from gpt.training.folder import RunFolder

COLUMNS = (
    "step",
    "tokens",
    "seconds",
    "train_loss",
    "learning_rate",
    "gradient_norm",
    "tokens_per_second",
    "val_loss",
    "val_perplexity",
    "val_bits_per_byte",
)


class GrowingText:
    """A text file in the run's folder that grows; `write` replaces it atomically."""

    def __init__(self, folder: RunFolder, name: str) -> None:
        self.folder, self.filename = folder, name
        self.text = ""

    def write(self) -> None:
        """Write the file, unless it would be empty."""
        if self.text:
            with atomic_write(self.folder / self.filename) as file:
                file.write(self.text)

    def cut(self, characters: int) -> None:
        """Continue after the first `characters` of the file, or from nothing if it is missing."""
        path = self.folder / self.filename
        self.text = path.read_text(encoding="utf-8")[:characters] if path.is_file() else ""


class MetricsCSV(Logger):
    """metrics.csv, a row for each interval or validation.

    Lightning's CSVLogger deletes the file of a resumed run.
    """

    def __init__(self, folder: RunFolder) -> None:
        super().__init__()
        self.file = GrowingText(folder, "metrics.csv")

    @property
    def name(self) -> str:
        """The run's name."""
        return self.file.folder.name

    @property
    def version(self) -> str:
        """Empty: a run's folder is its only version."""
        return ""

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing: the run's config.yaml has them."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Add a row; unknown names are left out."""
        known = {name: f"{metrics[name]:.8g}" for name in COLUMNS if name in metrics}
        lines = io.StringIO()
        writer = csv.DictWriter(lines, COLUMNS, lineterminator="\n")
        if not self.file.text:
            writer.writeheader()
        writer.writerow({**known, "step": step or 0})
        self.file.text += lines.getvalue()

    @rank_zero_only
    def save(self) -> None:
        """Write all rows; a run that never began leaves no file."""
        self.file.write()


class TensorBoard(Callback):
    """Adds TensorBoard's logger, if it is installed, when the run's folder is known.

    Args:
        folder: the run's; the logs go into `tensorboard/`.
        purge_step: the step of the checkpoint that is resumed.
    """

    def __init__(self, folder: RunFolder, purge_step: int | None) -> None:
        self.folder, self.purge_step = folder, purge_step

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Add the logger."""
        if not find_spec("tensorboard"):
            return
        logger = TensorBoardLogger(
            self.folder / "", "tensorboard", "", default_hp_metric=False, purge_step=self.purge_step
        )
        trainer.loggers = [*trainer.loggers, logger]


class Meter(Callback):
    """Logs loss, learning rate and speed every `every` steps.

    The losses in between are summed on the device: reading one would wait for the device.

    Args:
        every: steps between two rows.
        metrics: the file to cut when a run resumes, if there is one.
    """

    def __init__(self, every: int, metrics: MetricsCSV | None = None) -> None:
        if every < 1:
            raise InputError(f"log_every must be at least 1, got {every}")
        self.every = every
        self.metrics = metrics
        self.steps = self.tokens = self.interval_batches = self.interval_tokens = 0
        self.seconds = self.train_seconds = 0.0
        self.loss_sum: torch.Tensor | float = 0.0
        self.train_loss = self.tokens_per_second = float("nan")
        self.last_validation: dict[str, float] = {}
        self._started = self._interval_started = self._validation_started = 0.0

    def elapsed(self) -> float:
        """Seconds of training and validation, over all resumes."""
        return time.perf_counter() - self._started

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clocks, those of a resumed run where they stopped; the module need not log."""
        pl_module.logs_itself = False  # type: ignore[assignment]
        now = time.perf_counter()
        self._started, self._interval_started = now - self.train_seconds, now - self._interval_started

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count a batch, and log at the end of an interval."""
        self.loss_sum = self.loss_sum + pl_module.last_loss  # type: ignore[operator]
        self.interval_batches += 1
        self.interval_tokens += batch[0].numel() * trainer.world_size
        if trainer.global_step == self.steps:  # gradients accumulate, no update yet
            return
        self.steps = trainer.global_step
        if self.steps % self.every and self.steps != pl_module.planned_steps:
            return
        mean = torch.as_tensor(self.loss_sum, device=pl_module.device) / self.interval_batches
        self.train_loss = float(trainer.strategy.reduce(mean, reduce_op="mean"))  # over all processes
        now = time.perf_counter()
        self.tokens += self.interval_tokens
        self.tokens_per_second = self.interval_tokens / (now - self._interval_started)
        self.seconds = now - self._started
        metrics = {
            "train_loss": self.train_loss,
            "learning_rate": trainer.optimizers[0].param_groups[0]["lr"],
            "gradient_norm": float(pl_module.last_gradient_norm),  # type: ignore[arg-type]
            "tokens_per_second": self.tokens_per_second,
        }
        self._log(trainer, self.tokens, self.seconds, metrics)
        self.loss_sum, self.interval_batches, self.interval_tokens = 0.0, 0, 0
        self._interval_started = now

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the time."""
        self._validation_started = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the validation metrics."""
        names = [name for name in COLUMNS if name.startswith("val_") and name in trainer.callback_metrics]
        self.last_validation = {name: float(trainer.callback_metrics[name]) for name in names}
        self._log(trainer, self.tokens + self.interval_tokens, self.elapsed(), self.last_validation)
        for logger in trainer.loggers:
            logger.save()
        self._interval_started += time.perf_counter() - self._validation_started  # not training time

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock."""
        self.train_seconds = time.perf_counter() - self._started

    def state_dict(self) -> dict[str, Any]:
        """All counts and clocks, and the length of metrics.csv."""
        now = time.perf_counter()
        return {
            "steps": self.steps,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "train_seconds": now - self._started,
            "interval_seconds": now - self._interval_started,
            "interval_batches": self.interval_batches,
            "interval_tokens": self.interval_tokens,
            "train_loss": self.train_loss,
            "last_validation": self.last_validation,
            "csv": len(self.metrics.file.text) if self.metrics else 0,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        state = dict(state_dict)
        written = state.pop("csv")
        self._interval_started = state.pop("interval_seconds")
        self.__dict__.update(state)
        if self.metrics:
            self.metrics.file.cut(written)

    def _log(self, trainer: Trainer, tokens: int, seconds: float, metrics: dict[str, float]) -> None:
        metrics = {**metrics, "tokens": tokens, "seconds": seconds}
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)
