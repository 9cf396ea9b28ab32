"""What a run records: metrics.csv, loggers, samples.txt, the progress on stderr, summary.json.

A resumed run cuts off what was written after its checkpoint, and continues.
"""

import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor

from gpt.data.module import TokenData
from gpt.errors import InputError
from gpt.model import GPT
from gpt.pictures.runs import loss_curve
from gpt.progress import progress, report
from gpt.run.options import Options
from gpt.training.module import VALIDATED
from gpt.weights.checkpoint import RunPart

COLUMNS = (
    "step",
    "tokens",
    "seconds",
    "train_loss",
    "learning_rate",
    "gradient_norm",
    "tokens_per_second",
    *VALIDATED,
)


class Record:
    """Writes a row every `log_every` updates and at each validation, and counts in `run`, whose windows have
    `window` tokens.

    The losses in between are summed on the device: reading one would wait for the device. Only the `first`
    process writes and prints.
    """

    def __init__(
        self,
        folder: Path,
        run: RunPart,
        options: Options,
        window: int,
        first: bool = True,
    ) -> None:
        self.folder = folder
        self.run = run
        self.every = options.log_every
        self.window = window
        self.first = first
        self.loss_sum = torch.tensor(0.0)
        self._bar = ExitStack()
        self._loggers: list[Logger] = []
        self._step = run.step  # of the last row
        self._at = time.perf_counter()
        self._started = self._at - run.seconds
        if not first:
            return
        names = options.trainer.logger.split(",")
        self._loggers = [_logger(name, folder, run.step) for name in names if name != "csv"]
        for name, size in (("metrics.csv", run.csv), ("samples.txt", run.samples)):
            if (path := folder / name).is_file():
                os.truncate(path, min(size, path.stat().st_size))
        bar = progress("training", run.total, done=run.step, unit="steps")
        self._advance: Callable[..., None] = self._bar.enter_context(bar)

    @property
    def tokens(self) -> int:
        """Trained on, by all processes."""
        return self.run.place * self.window

    def elapsed(self) -> float:
        """Seconds of training and validation, over all resumes."""
        return time.perf_counter() - self._started

    def batch(self, loss: Tensor) -> None:
        """Count a batch."""
        self.loss_sum = self.loss_sum + loss
        self.run.batches += 1

    def is_due(self) -> bool:
        """Whether a row follows this update."""
        return self.run.step % self.every == 0 or self.run.step == self.run.total

    def update(self, loss: float, rate: float, norm: float) -> None:
        """Write the row of an interval, whose mean loss is given."""
        run = self.run
        self.loss_sum = torch.zeros_like(self.loss_sum)
        run.batches = 0
        if not self.first:
            return
        made = run.step - self._step
        self._step = run.step
        before = self._at
        self._at = time.perf_counter()
        speed = self.tokens * made / run.step / (self._at - before)
        figures = {"train_loss": loss, "learning_rate": rate, "gradient_norm": norm}
        self._row({**figures, "tokens_per_second": speed})
        self._advance(made, f"loss {loss:.3f}, {speed:,.0f} tokens/s", run.total)

    def paused(self, seconds: float) -> None:
        """Leave a validation of so many seconds out of the speed."""
        self._at += seconds

    def validated(
        self, figures: dict[str, float], model: GPT, data: TokenData, temperature: float = 1.0
    ) -> None:
        """Write the figures of a validation, and continue an empty document, from the same seed each time.

        The sample is that of logits which are divided by the temperature, as they are where the checkpoint's
        weights are used.
        """
        from gpt.generation import Sampling, stream_samples

        run = self.run
        run.validation = {name: value if math.isfinite(value) else None for name, value in figures.items()}
        if not self.first:
            return
        self._row(figures)
        told = "  ".join(f"{name} {value:.4g}" for name, value in figures.items())
        sampling = Sampling(temperature=0.8 * temperature, top_k=50)
        pieces = stream_samples(model, data.tokenizer, "", sampling=sampling, max_new_tokens=64, seed=0)
        text = "".join(piece for _, piece in pieces).strip()
        self._append("samples.txt", f"--- step {run.step}\n{text}\n\n")
        report(f"step {run.step}  {told}", text, prefix="")

    def note(self) -> None:
        """Count what a checkpoint keeps: the seconds, and the files so far, which are on the disk then."""
        self.run.seconds = self.elapsed()
        if self.first:
            self.run.csv = self._size("metrics.csv")
            self.run.samples = self._size("samples.txt")

    def close(self) -> None:
        """Take the progress bar away, and close the loggers."""
        self._bar.close()
        for logger in self._loggers:
            logger.finalize("success")

    def summary(self, trainer: Any) -> dict[str, Any]:
        """Draw loss.png. The figures of the run, sizes in bytes."""
        run = self.run
        loss_curve(self.folder / "metrics.csv", self.folder / "loss.png")
        device = trainer.strategy.root_device
        return {
            "text": Path(trainer.datamodule.options.corpus).name,
            **{name: run.validation.get(name) for name in VALIDATED if name != "val_perplexity"},
            "best_loss": run.best_loss,
            "best_step": run.best_step,
            "train_seconds": round(run.seconds, 2),
            "steps": run.step,
            "tokens": self.tokens,
            "tokens_per_second": round(self.tokens / max(run.seconds, 1e-9)),
            "peak_memory_bytes": _peak_memory_bytes(device),
            "parameters": trainer.lightning_module.model.num_parameters(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "precision": str(trainer.precision),
        }

    def _row(self, figures: dict[str, float]) -> None:
        figures = {"step": self.run.step, "tokens": self.tokens, "seconds": self.elapsed(), **figures}
        cells = (f"{figures[name]:.8g}" if name in figures else "" for name in COLUMNS)
        self._append("metrics.csv", f"{','.join(cells)}\n", head=f"{','.join(COLUMNS)}\n")
        for logger in self._loggers:
            logger.log_metrics(figures, step=self.run.step)

    def _append(self, name: str, text: str, head: str = "") -> None:
        with open(self.folder / name, "ab") as file:
            file.write(text.encode() if file.tell() else f"{head}{text}".encode())

    def _size(self, name: str) -> int:
        with open(self.folder / name, "ab") as file:
            os.fsync(file.fileno())
            return file.tell()


def _logger(name: str, folder: Path, resumed_at: int) -> Logger:
    from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger

    try:
        if name == "wandb":
            return WandbLogger(name=folder.name, save_dir=folder)
        return TensorBoardLogger(folder, "tensorboard", "", default_hp_metric=False, purge_step=resumed_at)
    except ImportError:
        raise InputError(f"the logger {name} needs a package: pip install {name}") from None


def _peak_memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return 0  # the standard library cannot tell
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB
