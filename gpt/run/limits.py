"""How many updates a run makes: from steps, epochs, a time, a plan and early stopping, decided here alone."""

import math
import sys
import time
from datetime import timedelta

from gpt import STARTED
from gpt.errors import InputError
from gpt.plan.plan import END_SECONDS, Plan
from gpt.progress import report
from gpt.run.options import Options
from gpt.run.signals import Stopped
from gpt.weights.checkpoint import RunPart

_RECENT = 0.2  # fraction of the run over which speed is averaged
_OFF = 0.01  # fraction of the time by which a planned run may be off uncorrected
_EVERY = 0.05  # fraction of the time between two corrections, and before the first


class Limits:
    """Decides `run.total`, the number of updates, at each moment: `reason` says what it comes from.

    With a time limit it is estimated after each update from the recent speed. A run that was planned for a
    time has a fixed number, corrected rarely, where the speed is another one. A resumed run takes what its
    checkpoint says, unless its options were changed; limits count over all resumes.
    """

    def __init__(
        self, options: Options, run: RunPart, plan: Plan | None = None, minutes: float | None = None
    ) -> None:
        self.options = options.trainer
        self.patience = options.early_stopping
        self.run = run
        self.plan = plan
        self.minutes = minutes
        self.seconds = options.trainer.max_seconds
        if self.options.max_steps == self.options.max_epochs == -1 and self.seconds is None:
            raise InputError("the run needs an end: give --trainer.max_steps, max_epochs or max_time")
        self.reason = ""
        self._fastest = run.seconds_per_step or 0.0  # the seconds of the shortest update but the first
        self._marks: list[tuple[int, float]] = []  # recent updates, with the seconds without validations
        self._corrected = 0.0  # when, in seconds
        self._validating = 0.0  # seconds of all validations
        self._validation = plan.validation if plan else 0.0  # seconds of the last
        self._whole = plan is None or plan.is_whole

    def count(self, steps_per_epoch: int) -> None:
        """Turn epochs into updates; a run that has a total already keeps it in the place of max_steps."""
        planned = self.run.total
        steps = self.options.max_steps
        epochs = self.options.max_epochs
        self._limit(sys.maxsize, "")
        if steps > 0:
            self._limit(planned if planned and self.seconds is None else steps)
        if epochs > 0 and epochs * steps_per_epoch < self._most:
            self._limit(epochs * steps_per_epoch, f"max_epochs {epochs} of {steps_per_epoch} steps")

    def check_left(self) -> None:
        """Stopped where no update is left."""
        if self.run.step >= self.run.total:
            done = f"all {self.run.step} steps are done ({self.reason})"
            raise Stopped(f"{done}: ask for more with --trainer.max_steps", 0)

    def begin(self, warms_up: bool, every: int) -> None:
        """Say what is planned, and begin to count; `every` so many updates it validates.

        The first update of a run that `warms_up` says nothing of the speed.
        """
        plans = [f"{self._most} steps ({self.reason})"] if self.reason else []
        if self.seconds is not None:
            plans.append(f"{_clock(self.seconds)} of training (max_time)")
        first = ", whichever comes first" if plans[1:] else ""
        report(f"planned: {', '.join(plans)}{first}", prefix="")
        elapsed = self.run.seconds
        self._every = every
        if self.minutes is not None:
            self.seconds = elapsed + STARTED + 60 * self.minutes - END_SECONDS - time.perf_counter()
            if self.seconds <= elapsed:
                raise InputError("the time is over before the first step: give more --minutes")
        self._marks = [] if warms_up or self.minutes else [(self.run.step, elapsed)]
        self._keep_time(elapsed)

    def update(self, elapsed: float) -> bool:
        """Count an update; whether the total of a planned run has changed, for its schedule."""
        if self.seconds is None:
            return False
        self._measure(elapsed - self._validating)
        return self._keep_time(elapsed)

    def paused(self, seconds: float) -> None:
        """Note how long a validation took, with all that came with it."""
        self._validation = seconds
        self._validating += seconds

    def validated(self, loss: float, before: float | None, elapsed: float) -> None:
        """Note the loss of a validation, in nats per token, and that of the last one, after so many seconds.

        Updates follow a planned part of the time, where the loss is the lowest at its end.
        """
        run = self.run
        best = math.inf if run.best_loss is None else run.best_loss
        # A planned run may be above its best for long, while its rate is high: it ends where the curve rises.
        falls = loss < (best if self.minutes is None or before is None else before)
        run.stalled = 0 if falls else run.stalled + 1
        if loss < best:
            run.best_loss = loss
            run.best_step = run.step
        if self._whole or self.stopped_early or run.step < run.total:
            return
        allowed = self._estimate((self.seconds or 0.0) - elapsed)
        if run.best_step < run.step or allowed < 1.2 * run.step:
            self.reason = f"held-out text was best after step {run.best_step}: longer gained nothing"
            return
        self._whole = allowed < 3 * run.step  # no later part would be as long
        self._limit(allowed if self._whole else 2 * run.step)
        report(f"after step {run.step}: held-out text still gains, {run.total} steps")

    @property
    def stopped_early(self) -> bool:
        """Whether so many validations as are allowed have not improved."""
        return self.patience is not None and self.run.stalled >= self.patience

    @property
    def is_over(self) -> bool:
        """Whether no update follows."""
        return self.stopped_early or self.run.step >= self.run.total

    def why(self) -> str:
        """What ended the run."""
        if self.stopped_early:
            return f"early stopping: val_loss was lowest after step {self.run.best_step}"
        return self.reason

    def _limit(self, steps: int, reason: str | None = None) -> None:
        self._most = steps
        self.run.total = steps
        self.reason = f"max_steps {steps}" if reason is None else reason

    def _keep_time(self, elapsed: float) -> bool:
        """Plan for the updates that the time allows; a planned run only where it would miss it by far."""
        run = self.run
        allowed = self.seconds
        if allowed is None:
            return False
        estimate = self._estimate(allowed - elapsed)
        if self.plan is None:
            run.total = min(self._most, estimate)
            if run.step == estimate < self._most:
                self.reason = f"max_time {_clock(allowed)}"
            return False
        if not self._whole:
            estimate = min(estimate, run.total)
        off = abs(estimate - run.total) * (run.seconds_per_step or 0.0)
        if elapsed <= self._corrected + _EVERY * allowed or off <= _OFF * allowed:
            return False
        if not self._corrected:  # the progress bar shows the later ones
            report(f"after step {run.step}: {estimate} steps in the time, not {run.total}")
        self._corrected = elapsed
        self._limit(estimate)
        return True

    def _measure(self, now: float) -> None:
        """The speed of the last part of the time, from the seconds without validations."""
        marks = self._marks
        step = self.run.step
        marks.append((step, now))
        if len(marks) > 2:
            self._fastest = min(self._fastest or now, now - marks[-2][1])
        while len(marks) > 2 and now - marks[1][1] > _RECENT * (self.seconds or 0.0):
            del marks[0]
        first, since = marks[0]
        if step > first:
            self.run.seconds_per_step = (now - since) / (step - first)

    def _estimate(self, left: float) -> int:
        """The last update before the time is over, with so many seconds left."""
        step = self.run.step
        speed = self.run.seconds_per_step
        if speed is None:
            return sys.maxsize if left > 0 else step
        steps = int(left / speed)
        for _ in range(2):  # those within the updates that they leave; max_time does not count the last
            ahead = (step + steps) // self._every - (step - 1) // self._every
            validations = ahead + (1 if self.minutes else 0)
            steps = int((left - validations * self._validation) / speed)
        # A run that was held up for a moment has not become slower: it stops where no update fits any more.
        return step + max(int(left >= self._fastest), steps)


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
