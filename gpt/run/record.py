"""What a run records: metrics.csv, loggers, samples.txt, the progress on stderr, summary.json.

A resumed run cuts off what was written after its checkpoint, and continues.
"""

import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor

from gpt.data.module import TokenData
from gpt.errors import InputError
from gpt.files import atomic_write, write_json
from gpt.model import GPT
from gpt.pictures.runs import loss_curve
from gpt.plan.plan import Plan
from gpt.progress import progress
from gpt.run.folder import RunFolder
from gpt.training.module import VALIDATED
from gpt.weights.checkpoint import RunPart

COLUMNS = (
    *("step", "tokens", "seconds", "train_loss", "learning_rate", "gradient_norm", "tokens_per_second"),
    *VALIDATED,
)


class GrowingText:
    """A text file in the run's folder that grows."""

    def __init__(self, folder: RunFolder, file: str) -> None:
        self.folder, self.file, self.text = folder, file, ""

    def save(self) -> None:
        """Replace the file, unless it would be empty."""
        if self.text:
            with atomic_write(self.folder / self.file, "wb") as file:
                file.write(self.text.encode())

    def cut(self, characters: int) -> None:
        """Continue after the first `characters` of the file, or from nothing if it is missing."""
        path = self.folder / self.file
        # By bytes: reading as text would change a carriage return in a sample.
        self.text = path.read_bytes().decode()[:characters] if path.is_file() else ""


class Record:
    """Counts tokens and time, and writes a row every `every` updates and at each validation.

    The losses in between are summed on the device: reading one would wait for the device. Only the `first`
    process writes and, if it is to `show`, prints.
    """

    def __init__(self, folder: RunFolder, every: int, show: bool) -> None:
        self.every, self.show = every, show
        self.metrics, self.samples = GrowingText(folder, "metrics.csv"), GrowingText(folder, "samples.txt")
        self.folder, self.loggers = folder, list[Logger]()
        self.first = True
        self.tokens = self.interval_batches = self.interval_tokens = 0
        self.train_seconds = self._interval_seconds = 0.0
        self.loss_sum: Tensor | float = 0.0
        self.validation: dict[str, float] = {}
        self._advance: Callable[..., None] = lambda *_: None
        self._bar, self._shown = ExitStack(), 0  # updates
        self._started = self._interval_started = 0.0

    def open(self, names: Sequence[str], first: bool, resumed_at: int) -> None:
        """Begin to write, with the loggers of these names, in the run's folder."""
        self.first, self.show = first, self.show and first
        if first:
            self.loggers = [_logger(name, self.folder, resumed_at) for name in names if name != "csv"]

    def begin(self, step: int, total: int) -> None:
        """Start the clocks, those of a resumed run where they stopped, and the progress bar."""
        now = time.perf_counter()
        self._started, self._interval_started = now - self.train_seconds, now - self._interval_seconds
        if self.show:
            bar = progress("training", total, done=step, unit="steps")
            self._advance, self._shown = self._bar.enter_context(bar), step

    def elapsed(self) -> float:
        """Seconds of training and validation, over all resumes."""
        return time.perf_counter() - self._started

    def batch(self, loss: Tensor, tokens: int) -> None:
        """Count a batch with its loss, and its tokens in all processes."""
        self.loss_sum = self.loss_sum + loss
        self.interval_batches += 1
        self.interval_tokens += tokens

    def is_due(self, step: int, total: int) -> bool:
        """Whether a row follows this update."""
        return step % self.every == 0 or step == total

    def update(self, step: int, total: int, loss: float, rate: float, norm: float) -> None:
        """Write the row of an interval, whose mean loss is given."""
        before, self._interval_started = self._interval_started, time.perf_counter()
        speed = self.interval_tokens / (self._interval_started - before)
        self.tokens += self.interval_tokens
        self.loss_sum, self.interval_batches, self.interval_tokens = 0.0, 0, 0
        figures = {"train_loss": loss, "learning_rate": rate, "gradient_norm": norm}
        self._row(step, {**figures, "tokens_per_second": speed})
        self._advance(step - self._shown, f"loss {loss:.3f}, {speed:,.0f} tokens/s", total)
        self._shown = step

    def validated(self, step: int, figures: dict[str, float]) -> None:
        """Write the figures of a validation."""
        self.validation = figures
        self._row(step, figures)
        self.save()
        if self.show:
            told = "  ".join(f"{name} {value:.4g}" for name, value in figures.items())
            print(f"step {step}  {told}", file=sys.stderr)

    def paused(self, seconds: float) -> None:
        """Leave the time of a validation out of the speed."""
        self._interval_started += seconds

    def sample(self, step: int, model: GPT, data: TokenData) -> None:
        """Continue an empty document, from the same seed each time."""
        if not self.first:
            return
        from gpt.generation import Sampling, stream

        how: dict[str, Any] = {
            "sampling": Sampling(temperature=0.8, top_k=50),
            "max_new_tokens": 64,
            "seed": 0,
        }
        # Without graphs: a recording that fails could reach the training.
        text = "".join(stream(model, data.tokenizer, "", graphs=False, **how)).strip()
        self.samples.text += f"--- step {step}\n{text}\n\n"
        self.samples.save()
        if self.show and text:
            print(f"\x1b[2m{text}\x1b[0m" if sys.stderr.isatty() else text, file=sys.stderr)

    def save(self) -> None:
        """Write out what has been recorded so far."""
        if self.first:
            self.metrics.save()
        for logger in self.loggers:
            logger.save()

    def close(self) -> None:
        """Stop the clocks, the progress bar and the loggers."""
        self.train_seconds = self.elapsed()
        self.abandon()
        for logger in self.loggers:
            logger.finalize("success")

    def abandon(self) -> None:
        """Take the progress bar away."""
        self._bar.close()

    def counts(self) -> dict[str, Any]:
        """What a checkpoint keeps, as fields of `RunPart`."""
        return {
            "tokens": self.tokens,
            "interval_tokens": self.interval_tokens,
            "interval_batches": self.interval_batches,
            "interval_seconds": time.perf_counter() - self._interval_started,
            "train_seconds": self.elapsed(),
            "validation": {name: finite(value) for name, value in self.validation.items()},
            "csv": len(self.metrics.text),
            "samples": len(self.samples.text),
        }

    def restore(self, run: RunPart, rank: int, processes: int) -> None:
        """Continue after a checkpoint."""
        self.tokens, self.interval_tokens = run.tokens, run.interval_tokens
        self.interval_batches = run.interval_batches
        self._interval_seconds, self.train_seconds = run.interval_seconds, run.train_seconds
        self.validation = {
            name: _number(value) for name, value in run.validation.items() if name in VALIDATED
        }
        sums = [_number(value) for value in run.loss_sums]
        self.loss_sum = sums[rank] if len(sums) == processes else sum(sums) / max(1, len(sums))
        if self.first:
            self.metrics.cut(run.csv)
            self.samples.cut(run.samples)

    def _row(self, step: int, figures: dict[str, float]) -> None:
        figures = {**figures, "tokens": self.tokens + self.interval_tokens, "seconds": self.elapsed()}
        row = {name: f"{figures[name]:.8g}" for name in COLUMNS if name in figures} | {"step": str(step)}
        self.metrics.text = self.metrics.text or f"{','.join(COLUMNS)}\n"
        self.metrics.text += f"{','.join(row.get(name, '') for name in COLUMNS)}\n"
        for logger in self.loggers:
            logger.log_metrics(figures, step=step)


def finite(value: float) -> float | None:
    """None in the place of a number that JSON has no text for."""
    return value if math.isfinite(value) else None


def _number(value: Any) -> float:
    """The inverse of `finite`."""
    return math.nan if value is None else float(value)


def _logger(name: str, folder: RunFolder, resumed_at: int) -> Logger:
    from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger

    try:
        if name == "tensorboard":
            options: dict[str, Any] = {"default_hp_metric": False, "purge_step": resumed_at or None}
            return TensorBoardLogger(folder / "", "tensorboard", "", **options)
        return WandbLogger(name=(folder / "").name, save_dir=folder / "")
    except ImportError:
        raise InputError(f"the logger {name} needs a package: pip install {name}") from None


def write_summary(
    folder: Path, record: Record, trainer: Any, step: int, plan: Plan | None, seconds: float
) -> dict[str, Any]:
    """Write loss.png and summary.json after so many seconds; sizes in bytes. Returns the latter."""
    loss_curve(folder / "metrics.csv", folder / "loss.png")
    device, tokens = trainer.strategy.root_device, record.tokens + record.interval_tokens
    summary: dict[str, Any] = {
        "text": Path(trainer.datamodule.options.corpus).name,
        "val_bits_per_byte": record.validation.get("val_bits_per_byte"),
        "val_standard_error": record.validation.get("val_standard_error"),
        "val_loss": record.validation.get("val_loss"),
        "train_seconds": round(record.train_seconds, 2),
        "steps": step,
        "tokens": tokens,
        "tokens_per_second": round(tokens / max(record.train_seconds, 1e-9)),
        "peak_memory_bytes": _peak_memory_bytes(device),
        "parameters": trainer.lightning_module.model.num_parameters(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "precision": str(trainer.precision),
    }
    if plan:
        summary |= plan.compared(seconds, summary)
    write_json(folder / "summary.json", summary)
    return summary


def _peak_memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return 0  # the standard library cannot tell
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB
