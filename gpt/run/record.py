"""What a run records; a resumed run cuts off what was written after its checkpoint, and continues."""

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

from gpt import STARTED
from gpt.errors import check_least
from gpt.files import atomic_write, write_json
from gpt.pictures.runs import loss_curve
from gpt.plan.plan import Plan
from gpt.progress import progress
from gpt.run.folder import RunFolder
from gpt.training.shard import is_sharded

COLUMNS = (
    *("step", "tokens", "seconds", "train_loss", "learning_rate", "gradient_norm", "tokens_per_second"),
    *("val_loss", "val_perplexity", "val_bits_per_byte", "val_standard_error"),
)


class GrowingText:
    """A text file in the run's folder that grows."""

    def __init__(self, folder: RunFolder, file: str) -> None:
        self.folder, self.file, self.text = folder, file, ""

    @rank_zero_only
    def save(self) -> None:
        """Replace the file, unless it would be empty."""
        if self.text:
            with atomic_write(self.folder / self.file) as file:
                file.write(self.text)

    def cut(self, characters: int) -> None:
        """Continue after the first `characters` of the file, or from nothing if it is missing."""
        path = self.folder / self.file
        self.text = path.read_text(encoding="utf-8")[:characters] if path.is_file() else ""


class MetricsCSV(GrowingText, Logger):
    """metrics.csv, a row for each interval or validation; CSVLogger deletes the file of a resumed run."""

    name = version = ""  # the run's folder has its name

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing: the run's config.yaml has them."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        row = {name: f"{metrics[name]:.8g}" for name in COLUMNS if name in metrics} | {"step": str(step or 0)}
        self.text = self.text or f"{','.join(COLUMNS)}\n"
        self.text += f"{','.join(row.get(name, '') for name in COLUMNS)}\n"


class TensorBoard(Callback):
    """Adds TensorBoard's logger, if it is installed, when the run's folder is known."""

    def __init__(self, folder: RunFolder, purge_step: int | None) -> None:
        self.folder, self.purge_step = folder, purge_step

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        if find_spec("tensorboard"):
            options: dict[str, Any] = {"default_hp_metric": False, "purge_step": self.purge_step}
            trainer.loggers += [TensorBoardLogger(self.folder / "", "tensorboard", "", **options)]


class Meter(Callback):
    """Logs loss, learning rate and speed every `every` steps, and cuts `metrics` when a run resumes.

    The losses in between are summed on the device: reading one would wait for the device. With `show` the
    figures are on stderr too, as a progress bar or lines.
    """

    def __init__(self, every: int, metrics: MetricsCSV | None = None, show: bool = False) -> None:
        check_least(1, log_every=every)
        self.every, self.metrics, self.show = every, metrics, show
        self._advance: Callable[..., None] = lambda *_: None
        self._bar, self._shown = ExitStack(), 0  # steps
        self.steps = self.tokens = self.interval_batches = self.interval_tokens = 0
        self.train_seconds = 0.0
        self.loss_sum: torch.Tensor | float = 0.0
        self.last_validation: dict[str, float] = {}
        self._started = self._interval_started = self._validation_started = 0.0

    def elapsed(self) -> float:
        """Seconds of training and validation, over all resumes."""
        return time.perf_counter() - self._started

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Start the clocks, those of a resumed run where they stopped; the module need not log."""
        pl_module.logs_itself = False
        now = time.perf_counter()
        self._started, self._interval_started = now - self.train_seconds, now - self._interval_started
        if self.show and trainer.is_global_zero:
            bar = progress("training", pl_module.planned_steps, done=self.steps, unit="steps")
            self._advance, self._shown = self._bar.enter_context(bar), self.steps

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        self.loss_sum = self.loss_sum + pl_module.last_loss
        self.interval_batches += 1
        self.interval_tokens += batch[0].numel() * trainer.world_size
        if trainer.global_step == self.steps:  # gradients accumulate, no update yet
            return
        self.steps = trainer.global_step
        if self.steps % self.every and self.steps != pl_module.planned_steps:
            return
        mean = torch.as_tensor(self.loss_sum, device=pl_module.device) / self.interval_batches
        loss = float(trainer.strategy.reduce(mean, reduce_op="mean"))  # over all processes
        before, self._interval_started = self._interval_started, time.perf_counter()
        speed = self.interval_tokens / (self._interval_started - before)
        self.tokens += self.interval_tokens
        self.loss_sum, self.interval_batches, self.interval_tokens = 0.0, 0, 0
        metrics = {
            "train_loss": loss,
            "learning_rate": trainer.optimizers[0].param_groups[0]["lr"],
            "gradient_norm": float(pl_module.last_gradient_norm),
            "tokens_per_second": speed,
        }
        self._log(trainer, metrics)
        figures = f"loss {loss:.3f}, {speed:,.0f} tokens/s"
        self._advance(self.steps - self._shown, figures, pl_module.planned_steps)
        self._shown = self.steps

    def on_validation_start(self, *_: Any) -> None:
        self._validation_started = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
        found = trainer.callback_metrics
        self.last_validation = {name: float(found[name]) for name in COLUMNS[-4:] if name in found}
        self._log(trainer, self.last_validation)
        for logger in trainer.loggers:
            logger.save()
        if self.show and trainer.is_global_zero:
            figures = "  ".join(f"{name} {value:.4g}" for name, value in self.last_validation.items())
            print(f"step {trainer.global_step}  {figures}", file=sys.stderr)
        self._interval_started += time.perf_counter() - self._validation_started  # not training time

    def on_train_end(self, *_: Any) -> None:
        self.train_seconds = self.elapsed()
        self._bar.close()

    def on_exception(self, *_: Any) -> None:
        self._bar.close()

    def state_dict(self) -> dict[str, Any]:
        names = ("steps", "tokens", "interval_batches", "interval_tokens", "last_validation")
        return {
            **{name: getattr(self, name) for name in names},
            "train_seconds": self.elapsed(),
            "interval_seconds": time.perf_counter() - self._interval_started,
            "csv": len(self.metrics.text) if self.metrics else 0,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = dict(state_dict)
        written, self._interval_started = state.pop("csv"), state.pop("interval_seconds")
        vars(self).update(state)
        if self.metrics:
            self.metrics.cut(written)

    def _log(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        metrics = {**metrics, "tokens": self.tokens + self.interval_tokens, "seconds": self.elapsed()}
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)


class Samples(Callback):
    """samples.txt, and stderr with `show`: an empty document continued from one seed at each validation."""

    def __init__(self, folder: RunFolder, show: bool = False) -> None:
        self.file, self.show = GrowingText(folder, "samples.txt"), show

    @rank_zero_only
    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        if is_sharded(pl_module.model):
            return  # the first process has only a part of the weights
        from gpt.generation import Sampling, stream

        tokenizer = trainer.datamodule.tokenizer  # type: ignore[attr-defined]
        sampling = Sampling(temperature=0.8, top_k=50)
        how = {"max_new_tokens": 64, "sampling": sampling, "seed": 0}
        # Without graphs: a recording that fails could reach the training.
        pieces = stream(pl_module.model, tokenizer, "", graphs=False, **how)
        text = "".join(pieces).strip()
        self.file.text += f"--- step {trainer.global_step}\n{text}\n\n"
        self.file.save()
        if self.show and text:
            print(f"\x1b[2m{text}\x1b[0m" if sys.stderr.isatty() else text, file=sys.stderr)

    def state_dict(self) -> dict[str, Any]:
        return {"characters": len(self.file.text)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.file.cut(state_dict["characters"])


def write_summary(folder: Path, trainer: Any, meter: Meter, plan: Plan | None) -> dict[str, Any]:
    """Write loss.png and summary.json, and return the latter; sizes in bytes, times in seconds."""
    loss_curve(folder / "metrics.csv", folder / "loss.png")
    device, tokens = trainer.strategy.root_device, meter.tokens + meter.interval_tokens
    summary: dict[str, Any] = {
        "val_bits_per_byte": meter.last_validation.get("val_bits_per_byte"),
        "val_standard_error": meter.last_validation.get("val_standard_error"),
        "val_loss": meter.last_validation.get("val_loss"),
        "train_seconds": round(meter.train_seconds, 2),
        "steps": trainer.global_step,
        "tokens": tokens,
        "tokens_per_second": round(tokens / max(meter.train_seconds, 1e-9)),
        "peak_memory_bytes": _peak_memory_bytes(device),
        "parameters": trainer.lightning_module.model.num_parameters(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "precision": str(trainer.precision),
    }
    if plan:
        summary |= plan.compared(time.perf_counter() - STARTED, summary)
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
