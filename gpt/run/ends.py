"""How a run ends: after a number of steps or epochs, after a time, or when validation stops improving."""

import math
import re
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping, Timer

from gpt.errors import InputError, check_least
from gpt.run.lightning_private import limit_steps
from gpt.run.record import Meter
from gpt.run.signals import Stopped
from gpt.training.module import steps_per_epoch
from gpt.training.output import report

_COMPILED_SECONDS = 600.0  # a run limited to less time is not compiled unless asked to
_RECENT = 0.2  # of the time: the speed is that of so much at most
_OFF = 0.01  # of the time: a planned run that is off by less is not corrected
_EVERY = 0.05  # of the time: between two corrections, and before the first


class Ends(Callback):
    """Plans the end of a run from the Trainer's `options`, and stops there; `done` steps are made already.

    Lightning gets one limit, in steps, so that a run limited by epochs resumes exactly too. With a time limit
    the number of steps is estimated after each step from the recent speed; a run that was planned for a time
    changes it rarely and saves the changes, so that it repeats exactly. Limits count over all resumes.

    Args:
        changes: the option `planned_steps`, STEP:TOTAL,...: each total, after the step that it is planned at.
        deadline: when training has to end, as `time.perf_counter` counts; None changes nothing by itself.
        validation: seconds that one is expected to take.
        save: is called with `planned_steps` when it has changed.
        extends: whether a planned run makes more steps where there is time for them.
    """

    def __init__(
        self,
        options: Any,
        done: int,
        meter: Meter,
        changes: str = "",
        deadline: float | None = None,
        validation: float = 0.0,
        save: Callable[[str], None] = print,
        extends: bool = True,
    ) -> None:
        self.max_steps = options.max_steps
        self.max_epochs = -1 if options.max_epochs is None else options.max_epochs
        try:
            seconds = Timer(options.max_time).time_remaining()
        except (MisconfigurationException, TypeError) as error:
            raise InputError(f"--trainer.max_time {options.max_time}: {error}") from None
        counts = [count for count in (self.max_steps, self.max_epochs) if count != -1]
        limits = [*counts, *([] if seconds is None else [seconds])]
        if not limits:
            raise InputError("the run needs an end: give --trainer.max_steps, max_epochs or max_time")
        if min(limits) <= 0:
            raise InputError("max_steps, max_epochs and max_time must be positive, or -1 for no limit")
        if not re.fullmatch(r"(0:[1-9]\d*(,\d+:[1-9]\d*)*)?", changes):
            raise InputError(f"planned_steps {changes}: expected 0:TOTAL,STEP:TOTAL")
        self.changes = {int(step): int(total) for step, total in re.findall(r"(\d+):(\d+)", changes)}
        self.max_seconds = math.inf if seconds is None else seconds
        self.done, self.meter, self.deadline, self.save = done, meter, deadline, save
        self.extends = extends
        self.reason = ""
        self._limit = sys.maxsize  # steps
        self._step = 0
        self._seconds_per_step: float | None = None
        self._marks: list[tuple[int, float]] = []  # recent steps, with the seconds without validations
        self._fastest = 0.0  # the seconds of the shortest step but the first
        self._corrected = 0.0  # when, in seconds
        self._paused: float | None = None  # since when it validates
        self._validating, self._validation = 0.0, validation  # seconds of all, and of the last

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Turn epochs into steps, before the optimizer asks for them."""
        if pl_module.compile_blocks is None and self.max_seconds < _COMPILED_SECONDS:
            pl_module.compile_blocks = False
        if self.max_steps > 0:
            self._limit, self.reason = self.max_steps, f"max_steps {self.max_steps}"
        if self.max_epochs > 0 and self.max_epochs * (epoch := steps_per_epoch(trainer)) < self._limit:
            self._limit = self.max_epochs * epoch
            self.reason = f"max_epochs {self.max_epochs} of {epoch} steps"
        if (trainer.min_steps or 0) > self._limit:
            raise InputError(f"min_steps {trainer.min_steps} is more than the run has: {self.reason}")
        if self.done >= self._limit:
            done = f"all {self.done} steps are done ({self.reason})"
            raise Stopped(f"{done}: ask for more with --trainer.max_steps", 0)
        limit_steps(trainer, self._limit)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._step, begin = trainer.global_step, self.meter.train_seconds
        if self.changes:
            self._move(trainer, pl_module, self.changes[max(at for at in self.changes if at <= self._step)])
        plans = [f"{self._limit} steps ({self.reason})"] if self.reason else []
        if self.max_seconds < math.inf:
            plans.append(f"{timedelta(seconds=round(self.max_seconds))} of training (max_time)")
        first = ", whichever comes first" if plans[1:] else ""
        report(f"planned: {', '.join(plans)}{first}", prefix="")
        if self.deadline is not None:
            self.max_seconds = begin + self.deadline - time.perf_counter()
        warms_up = pl_module.compile_blocks or self.changes  # its first step says nothing of the speed
        self._marks = [] if warms_up else [(self._step, begin)]
        if self.max_seconds < math.inf:
            self._keep_time(trainer, pl_module, begin)
        trainer.should_stop |= self._step >= pl_module.planned_steps

    def on_validation_start(self, *_: Any) -> None:
        self._paused = self.meter.elapsed()

    def on_train_batch_start(self, *_: Any) -> None:
        if self._paused is not None:  # a validation has ended, with its sample
            self._validation, self._paused = self.meter.elapsed() - self._paused, None
            self._validating += self._validation

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        """Estimate the number of steps; ask Lightning to stop after the last, which it then validates."""
        if trainer.global_step == self._step:  # gradients accumulate, no update yet
            return
        self._step = trainer.global_step
        if self.max_seconds < math.inf:
            clocks = self.meter.elapsed(), self._validating, self._validation
            elapsed, self._validating, self._validation = trainer.strategy.broadcast(clocks)
            self._measure(elapsed - self._validating)
            self._keep_time(trainer, pl_module, elapsed)
        if self._step in self.changes:
            self._move(trainer, pl_module, self.changes[self._step])
        trainer.should_stop |= self._step >= pl_module.planned_steps

    def _keep_time(self, trainer: Trainer, pl_module: Any, elapsed: float) -> None:
        """Plan for the steps that the time allows; a planned run only where it would miss it by far."""
        estimate = max(self._estimate(trainer, elapsed), trainer.min_steps or 0)
        if not self.changes:
            pl_module.planned_steps = min(self._limit, estimate)
            if self._step == estimate < self._limit:
                self.reason = f"max_time {timedelta(seconds=round(self.max_seconds))}"
            return
        planned, allowed = pl_module.planned_steps, self.max_seconds
        estimate = estimate if self.extends else min(estimate, planned)
        off = abs(estimate - planned) * (self._seconds_per_step or 0.0)
        if elapsed > self._corrected + _EVERY * allowed and off > _OFF * allowed:
            self._corrected, self.changes[self._step] = elapsed, estimate
            self.save(",".join(f"{at}:{to}" for at, to in sorted(self.changes.items())))
            report(f"after step {self._step}: {estimate} steps in the time, not {planned}")

    def _measure(self, now: float) -> None:
        """The speed of the last part of the time, from the seconds without validations."""
        self._marks.append((self._step, now))
        if len(self._marks) > 2:
            self._fastest = min(self._fastest or now, now - self._marks[-2][1])
        while len(self._marks) > 2 and now - self._marks[1][1] > _RECENT * self.max_seconds:
            del self._marks[0]
        first, since = self._marks[0]
        if self._step > first:
            self._seconds_per_step = (now - since) / (self._step - first)

    def _estimate(self, trainer: Trainer, elapsed: float) -> int:
        """The last step before the time limit, seen from this one after so many seconds."""
        left = self.max_seconds - elapsed
        if self._seconds_per_step is None:
            return sys.maxsize if left > 0 else self._step
        interval = trainer.val_check_interval
        every = interval // trainer.accumulate_grad_batches if isinstance(interval, int) else sys.maxsize
        steps = int(left / self._seconds_per_step)
        for _ in range(2):  # those within the steps that they leave; max_time does not count the last
            validations = (self._step + steps) // every - (self._step - 1) // every + bool(self.changes)
            steps = int((left - validations * self._validation) / self._seconds_per_step)
        # A run that was held up for a moment has not become slower: it stops where no step fits any more.
        return self._step + max(int(left >= self._fastest), steps)

    def _move(self, trainer: Trainer, pl_module: Any, total: int) -> None:
        """Plan for another number of steps from here on, and the learning rate with it."""
        self._limit, self.reason, pl_module.planned_steps = total, f"max_steps {total}", total
        limit_steps(trainer, total)
        schedule: Any = trainer.lr_scheduler_configs[0].scheduler
        groups = trainer.optimizers[0].param_groups
        for group, base, factor in zip(groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
            group["lr"] = base * factor(schedule.last_epoch)
        trainer.should_stop |= trainer.global_step >= total

    def state_dict(self) -> dict[str, Any]:
        return {"seconds_per_step": self._seconds_per_step} if self.max_seconds < math.inf else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._seconds_per_step = state_dict["seconds_per_step"]
        self._fastest = self._seconds_per_step or 0.0


class StopEarly(EarlyStopping):
    """Stops when `val_loss` has not improved for `patience` validations in a row."""

    def __init__(self, patience: int) -> None:
        check_least(1, early_stopping=patience)
        # A loss that is not finite is one that does not improve.
        super().__init__("val_loss", patience=patience, check_finite=False, check_on_train_epoch_end=False)

    @property
    def reason(self) -> str | None:
        """Why the run stopped; None if this did not stop it."""
        if self.wait_count < self.patience:
            return None
        return f"early stopping: val_loss was {float(self.best_score):.4g} {self.wait_count} validations ago"

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        trainer.should_stop |= self.reason is not None

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        super().on_validation_end(trainer, pl_module)
        if trainer.global_step < (trainer.min_steps or 0):
            trainer.should_stop = False  # Lightning would stop at min_steps, improved since or not

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the counts; the patience is the current option."""
        super().load_state_dict({**state_dict, "patience": self.patience})
