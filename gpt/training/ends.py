"""How a run ends: after a number of steps or epochs, after a time, or when validation stops improving."""

import sys
from datetime import timedelta
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping, Timer

from gpt.errors import InputError
from gpt.training.lightning_private import limit_steps
from gpt.training.output import report
from gpt.training.record import Meter

_COMPILED_SECONDS = 600.0  # a run limited to less time is not compiled unless asked to


class NothingLeft(Exception):
    """The run that is resumed has ended already."""


class Ends(Callback):
    """Plans the end of a run from the Trainer's `options`, and stops there; `done` steps are made already.

    Lightning gets one limit, in steps, so that a run limited by epochs resumes exactly too. With a time limit
    the number of steps is estimated after each step from the speed so far. The last step is validated. All
    limits count over all resumes.
    """

    def __init__(self, options: Any, done: int, meter: Meter) -> None:
        try:
            max_seconds = Timer(options.max_time).time_remaining()
        except (MisconfigurationException, TypeError) as error:
            raise InputError(f"--trainer.max_time {options.max_time}: {error}") from None
        max_steps, max_epochs = options.max_steps, -1 if options.max_epochs is None else options.max_epochs
        if min(max_steps, max_epochs) < -1 or 0 in (max_steps, max_epochs, max_seconds):
            raise InputError("max_steps, max_epochs and max_time must be positive, or -1 for no limit")
        if max_steps < 0 and max_epochs < 0 and max_seconds is None:
            raise InputError("the run needs an end: give --trainer.max_steps, max_epochs or max_time")
        self.max_steps, self.max_epochs, self.max_seconds = max_steps, max_epochs, max_seconds
        self.done, self.meter = done, meter
        self.reason = ""
        self._limit = sys.maxsize  # steps
        self._step = 0
        self._seconds_per_step: float | None = None
        self._begin = (0, 0.0)  # the step and the time from which on it is measured
        self._last = 0.0  # the time after the last step
        self._fastest = 0.0  # the seconds of the shortest step but the first
        self._compiles = False

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Turn epochs into steps, before the optimizer asks for them."""
        if pl_module.compile_blocks is None and (self.max_seconds or _COMPILED_SECONDS) < _COMPILED_SECONDS:
            pl_module.compile_blocks = False
        if self.max_steps > 0:
            self._limit, self.reason = self.max_steps, f"max_steps {self.max_steps}"
        if self.max_epochs > 0 and self.max_epochs * (epoch := _steps_per_epoch(trainer)) < self._limit:
            self._limit = self.max_epochs * epoch
            self.reason = f"max_epochs {self.max_epochs} of {epoch} steps"
        if self.done >= self._limit:
            done = f"all {self.done} steps are done ({self.reason})"
            raise NothingLeft(f"{done}: ask for more with --trainer.max_steps")
        limit_steps(trainer, self._limit)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Print the plan, and note where this process begins."""
        plans = [f"{self._limit} steps ({self.reason})"] if self.reason else []
        if self.max_seconds is not None:
            plans.append(f"{timedelta(seconds=round(self.max_seconds))} of training (max_time)")
        first = ", whichever comes first" if plans[1:] else ""
        report(f"planned: {', or '.join(plans)}{first}", prefix="")
        self._step = trainer.global_step
        self._begin = (self._step, self.meter.train_seconds)
        self._compiles = bool(pl_module.compile_blocks)
        if self.max_seconds is not None and self._seconds_per_step is not None:  # it resumes: see `Resume`
            pl_module.planned_steps = min(self._limit, self._estimate(*self._begin))

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        """Estimate the number of steps; ask Lightning to stop after the last, which it then validates."""
        step = trainer.global_step
        if step == self._step:  # gradients accumulate, no update yet
            return
        self._step = step
        if self.max_seconds is not None:
            elapsed = trainer.strategy.broadcast(self.meter.elapsed())
            if self._compiles:  # the first step says nothing of the speed
                self._begin, self._compiles = (step, elapsed), False
            else:
                self._seconds_per_step = (elapsed - self._begin[1]) / (step - self._begin[0])
            if self._last:
                self._fastest = min(self._fastest or elapsed, elapsed - self._last)
            self._last = elapsed
            estimate = max(self._estimate(step, elapsed), trainer.min_steps or 0)
            pl_module.planned_steps = min(self._limit, estimate)
            if step == estimate < self._limit:
                self.reason = f"max_time {timedelta(seconds=round(self.max_seconds))}"
        if step >= pl_module.planned_steps:
            trainer.should_stop = True

    def move(self, trainer: Trainer, pl_module: Any, total: int) -> None:
        """Plan for another number of steps from here on, and the learning rate with it."""
        self._limit, self.reason, pl_module.planned_steps = total, f"max_steps {total}", total
        limit_steps(trainer, total)
        schedule: Any = trainer.lr_scheduler_configs[0].scheduler
        for group, base, factor in zip(
            trainer.optimizers[0].param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True
        ):
            group["lr"] = base * factor(schedule.last_epoch)
        trainer.should_stop = trainer.should_stop or trainer.global_step >= total

    def _estimate(self, step: int, elapsed: float) -> int:
        """The last step before the time limit, seen from `step` after so many seconds."""
        left = (self.max_seconds or 0.0) - elapsed
        if self._seconds_per_step is None:
            return sys.maxsize if left > 0 else step
        # A run that was held up for a moment has not become slower: it stops where no step fits any more.
        return step + max(int(left >= self._fastest), int(left / self._seconds_per_step))

    def state_dict(self) -> dict[str, Any]:
        return {} if self.max_seconds is None else {"seconds_per_step": self._seconds_per_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._seconds_per_step = state_dict["seconds_per_step"]


class StopEarly(EarlyStopping):
    """Stops when `val_loss` has not improved for `patience` validations in a row."""

    def __init__(self, patience: int) -> None:
        if patience < 1:
            raise InputError(f"early_stopping must be at least 1 validation, got {patience}")
        super().__init__(monitor="val_loss", mode="min", patience=patience, check_on_train_epoch_end=False)

    @property
    def reason(self) -> str | None:
        """Why the run stopped; None if this did not stop it."""
        if self.wait_count < self.patience:
            return None
        return f"early stopping: val_loss was {float(self.best_score):.4g} {self.wait_count} validations ago"

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        """Stop a resumed run that had stopped early."""
        trainer.should_stop = trainer.should_stop or self.reason is not None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the counts; the patience is the current option."""
        super().load_state_dict({**state_dict, "patience": self.patience})


def _steps_per_epoch(trainer: Trainer) -> int:
    batches = len(trainer.datamodule.train_dataloader())  # type: ignore[attr-defined]
    limit = trainer.limit_train_batches
    batches = min(batches, limit) if isinstance(limit, int) else int(batches * (limit or 1.0))
    return max(1, -(-batches // trainer.accumulate_grad_batches))
