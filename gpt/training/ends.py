"""How a run ends: after a number of steps or epochs, after a time, or when validation stops improving."""

import sys
from datetime import timedelta
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping

from gpt.errors import InputError
from gpt.training.lightning_private import limit_steps
from gpt.training.output import announce
from gpt.training.record import Meter


class NothingLeft(Exception):
    """The run that is resumed has ended already."""


class Ends(Callback):
    """Plans the end of a run from its limits, and stops there.

    Lightning gets one limit, in steps, so that a run limited by epochs resumes exactly too. With a time
    limit, the number of steps is estimated after each step from the speed so far: the learning rate falls to
    its final value as the time runs out. The last step is always validated.

    Args:
        max_steps: updates in all; -1 for no such limit.
        max_epochs: passes over the training text in all; -1 for no such limit.
        max_seconds: training time in all, validations included, over all resumes; None for no such limit.
        done: steps of the run that is resumed.
        meter: measures the time.
    """

    def __init__(
        self, max_steps: int, max_epochs: int, max_seconds: float | None, done: int, meter: Meter
    ) -> None:
        if min(max_steps, max_epochs) < -1 or 0 in (max_steps, max_epochs, max_seconds):
            raise InputError("max_steps, max_epochs and max_time must be positive, or -1 for no limit")
        if max_steps < 0 and max_epochs < 0 and max_seconds is None:
            raise InputError("the run needs an end: give --trainer.max_steps, max_epochs or max_time")
        self.max_steps, self.max_epochs, self.max_seconds = max_steps, max_epochs, max_seconds
        self.done, self.meter = done, meter
        self.reason = ""
        self._limit = sys.maxsize  # steps
        self._step = 0
        self._begin = (0, 0.0)  # the step and the time at which this process began

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Turn epochs into steps and report the plan, before the optimizer asks for it.

        Raises:
            NothingLeft: the resumed run has done all its steps.
        """
        limits = {}
        if self.max_steps > 0:
            limits[f"max_steps {self.max_steps}"] = self.max_steps
        if self.max_epochs > 0:
            epoch = _steps_per_epoch(trainer)
            limits[f"max_epochs {self.max_epochs} of {epoch} steps"] = self.max_epochs * epoch
        if limits:
            self.reason = min(limits, key=lambda reason: limits[reason])
            self._limit = limits[self.reason]
        if self.done >= self._limit:
            raise NothingLeft(
                f"all {self.done} steps are done ({self.reason}): ask for more with --trainer.max_steps"
            )
        limit_steps(trainer, self._limit)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the plan, and note where this process begins."""
        plans = [f"{self._limit} steps ({self.reason})"] if self.reason else []
        if self.max_seconds is not None:
            plans.append(f"{timedelta(seconds=round(self.max_seconds))} of training (max_time)")
        announce(f"planned: {', or '.join(plans)}{', whichever comes first' if plans[1:] else ''}")
        self._step = trainer.global_step
        self._begin = (self._step, self.meter.train_seconds)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Estimate the number of steps; ask Lightning to stop after the last, which it then validates."""
        step = trainer.global_step
        if step == self._step:  # gradients accumulate, no update yet
            return
        self._step = step
        if self.max_seconds is not None:
            elapsed = trainer.strategy.broadcast(self.meter.elapsed())
            seconds_per_step = (elapsed - self._begin[1]) / (step - self._begin[0])
            estimate = step + max(0, int((self.max_seconds - elapsed) / seconds_per_step))
            estimate = max(estimate, trainer.min_steps or 0)
            pl_module.planned_steps = min(self._limit, estimate)  # type: ignore[assignment]
            if step == estimate < self._limit:
                self.reason = f"max_time {timedelta(seconds=round(self.max_seconds))}"
        if step >= pl_module.planned_steps:  # type: ignore[operator]
            trainer.should_stop = True


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

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
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
