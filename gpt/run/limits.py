"""How many updates a run makes: from steps, epochs, a time, a plan and early stopping, decided here alone."""

import math
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from gpt.errors import InputError
from gpt.run.options import Options
from gpt.run.signals import Stopped
from gpt.training.output import report
from gpt.weights.checkpoint import RunPart

COMPILED_SECONDS = 600.0
"""A run limited to less time is not compiled unless asked to."""
_RECENT = 0.2  # of the time: the speed is that of so much at most
_OFF = 0.01  # of the time: a planned run that is off by less is not corrected
_EVERY = 0.05  # of the time: between two corrections, and before the first


@dataclass(frozen=True, kw_only=True)
class Deadline:
    """What keeps a planned run on time."""

    at: float
    """When training and validation have to end, as `time.perf_counter` counts."""
    validation: float
    """Seconds that one is expected to take."""
    extends: bool
    """Whether to make more updates where there is time for them."""


class Limits:
    """The number of updates, `total`, at each moment: `reason` says what it comes from.

    With a time limit it is estimated after each update from the recent speed. A run that was planned for a
    time has a fixed number, corrected rarely, where the speed is another one. A resumed run takes what its
    checkpoint says, unless its options were changed; limits count over all resumes.
    """

    def __init__(self, options: Options, deadline: Deadline | None = None) -> None:
        trainer = options.trainer
        self.options, self.patience, self.deadline = trainer, options.early_stopping, deadline
        self.seconds = trainer.max_seconds
        if trainer.max_steps == trainer.max_epochs == -1 and self.seconds is None:
            raise InputError("the run needs an end: give --trainer.max_steps, max_epochs or max_time")
        self.total = self._most = sys.maxsize
        self.reason = ""
        self.stopped_early = False
        self._best: float | None = None
        self._stalled = 0
        self._seconds_per_step: float | None = None
        self._fastest = 0.0  # the seconds of the shortest update but the first
        self._marks: list[tuple[int, float]] = []  # recent updates, with the seconds without validations
        self._corrected = 0.0  # when, in seconds
        self._validating = 0.0  # seconds of all validations
        self._validation = deadline.validation if deadline else 0.0  # seconds of the last

    def count(self, step: int, steps_per_epoch: int, saved: int | None = None) -> None:
        """Turn epochs into updates, of which `step` are made; `saved` is a checkpoint's total, if it holds.

        Stopped where no update is left.
        """
        steps, epochs = self.options.max_steps, self.options.max_epochs
        if steps > 0:
            self._limit(steps if saved is None else saved)
        if epochs > 0 and epochs * steps_per_epoch < self._most:
            self._most = self.total = epochs * steps_per_epoch
            self.reason = f"max_epochs {epochs} of {steps_per_epoch} steps"
        if self.options.min_steps > self._most:
            raise InputError(f"min_steps {self.options.min_steps} is more than the run has: {self.reason}")
        if step >= self.total:
            done = f"all {step} steps are done ({self.reason})"
            raise Stopped(f"{done}: ask for more with --trainer.max_steps", 0)

    def tell(self) -> None:
        """Report what is planned."""
        plans = [f"{self._most} steps ({self.reason})"] if self.reason else []
        if self.seconds is not None:
            plans.append(f"{_clock(self.seconds)} of training (max_time)")
        first = ", whichever comes first" if plans[1:] else ""
        report(f"planned: {', '.join(plans)}{first}", prefix="")

    def begin(self, step: int, elapsed: float, warms_up: bool, every: int) -> None:
        """Begin to count after `step` updates and so many seconds; `every` so many updates it validates.

        The first update of a run that `warms_up` says nothing of the speed.
        """
        self._every = every
        if self.deadline:
            self.seconds = elapsed + self.deadline.at - time.perf_counter()
        self._marks = [] if warms_up or self.deadline else [(step, elapsed)]
        self._keep_time(step, elapsed)
        self.stopped_early = self._is_stalled()

    def update(self, step: int, elapsed: float) -> int | None:
        """Count an update; the total of a planned run where it has changed, for its schedule."""
        if self.seconds is None:
            return None
        self._measure(step, elapsed - self._validating)
        return self._keep_time(step, elapsed)

    def paused(self, seconds: float) -> None:
        """Note how long a validation took, with all that came with it."""
        self._validation = seconds
        self._validating += seconds

    def validated(self, step: int, loss: float) -> None:
        """Note the loss of a validation, in nats per token."""
        if math.isfinite(loss) and (self._best is None or loss < self._best):
            self._best, self._stalled = loss, 0
        else:
            self._stalled += 1
        self.stopped_early = self._is_stalled() and step >= self.options.min_steps

    def is_over(self, step: int) -> bool:
        """Whether no update follows."""
        return self.stopped_early or step >= self.total

    def why(self) -> str:
        """What ended the run."""
        if self.stopped_early:
            return f"early stopping: val_loss was {self._best:.4g} {self._stalled} validations ago"
        return self.reason

    def known(self) -> dict[str, Any]:
        """What a checkpoint keeps, as fields of `RunPart`."""
        speed = None if self.deadline else self._seconds_per_step
        return {"seconds_per_step": speed, "best": self._best, "stalled": self._stalled}

    def restore(self, run: RunPart, same_text: bool) -> None:
        """Continue from a checkpoint; another text has its own best."""
        self._seconds_per_step, self._fastest = run.seconds_per_step, run.seconds_per_step or 0.0
        if same_text:
            self._best, self._stalled = run.best, run.stalled

    def _limit(self, steps: int) -> None:
        self._most = self.total = steps
        self.reason = f"max_steps {steps}"

    def _is_stalled(self) -> bool:
        return self.patience is not None and self._stalled >= self.patience

    def _keep_time(self, step: int, elapsed: float) -> int | None:
        """Plan for the updates that the time allows; a planned run only where it would miss it by far."""
        allowed = self.seconds
        if allowed is None:
            return None
        estimate = max(self._estimate(step, allowed - elapsed), self.options.min_steps)
        if self.deadline is None:
            self.total = min(self._most, estimate)
            if step == estimate < self._most:
                self.reason = f"max_time {_clock(allowed)}"
            return None
        if not self.deadline.extends:
            estimate = min(estimate, self.total)
        off = abs(estimate - self.total) * (self._seconds_per_step or 0.0)
        if elapsed <= self._corrected + _EVERY * allowed or off <= _OFF * allowed:
            return None
        report(f"after step {step}: {estimate} steps in the time, not {self.total}")
        self._corrected = elapsed
        self._limit(estimate)
        return estimate

    def _measure(self, step: int, now: float) -> None:
        """The speed of the last part of the time, from the seconds without validations."""
        self._marks.append((step, now))
        if len(self._marks) > 2:
            latest = now - self._marks[-2][1]
            self._fastest = min(self._fastest or now, latest)
        while len(self._marks) > 2 and now - self._marks[1][1] > _RECENT * (self.seconds or 0.0):
            del self._marks[0]
        first, since = self._marks[0]
        if step > first:
            self._seconds_per_step = (now - since) / (step - first)

    def _estimate(self, step: int, left: float) -> int:
        """The last update before the time is over, with so many seconds left after `step`."""
        if self._seconds_per_step is None:
            return sys.maxsize if left > 0 else step
        steps = int(left / self._seconds_per_step)
        for _ in range(2):  # those within the updates that they leave; max_time does not count the last
            ahead = (step + steps) // self._every - (step - 1) // self._every
            validations = ahead + (1 if self.deadline else 0)
            steps = int((left - validations * self._validation) / self._seconds_per_step)
        # A run that was held up for a moment has not become slower: it stops where no update fits any more.
        return step + max(int(left >= self._fastest), steps)


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
