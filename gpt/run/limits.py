"""How many updates a run makes: from steps, epochs, a time, a plan and early stopping, decided here alone."""

import math
import time
from datetime import timedelta

from gpt import STARTED
from gpt.errors import InputError
from gpt.plan.plan import END_SECONDS, Plan
from gpt.progress import report
from gpt.run.options import Options
from gpt.run.signals import Stopped
from gpt.training.sampled import LATE, early_steps
from gpt.weights.checkpoint import RunPart

_RECENT = 0.2  # fraction of the run over which speed is averaged
_OFF = 0.01  # fraction of the time by which a planned run may be off uncorrected
_ENDLESS = 1 << 53  # updates: JSON's numbers go so far
_EVERY = 0.05  # fraction of the time between two corrections, and of the start, whose updates are slow


class Limits:
    """Decides `run.total`, the number of updates, at each moment: `reason` says what it comes from.

    With a time limit it is estimated after each update from the recent speed. A run that was planned for a
    time has a fixed number, corrected rarely, where the speed is another one. A resumed run takes what its
    checkpoint says, unless its options were changed; limits count over all resumes.
    """

    def __init__(
        self, options: Options, run: RunPart, plan: Plan | None = None, minutes: float | None = None
    ) -> None:
        self.options = options
        self.run = run
        self.plan = plan
        self.minutes = minutes
        plain = options.trainer
        self.seconds = plain.max_seconds
        if plain.max_steps == plain.max_epochs == -1 and self.seconds is None:
            raise InputError("the run needs an end: give --trainer.max_steps, max_epochs or max_time")
        # The first update of a run that compiles, or has begun just now, says nothing of the speed.
        warms_up = options.model.compile or minutes
        self._work = 0.0  # updates since then, in the time of one before the last fifth of all
        self._marks = [] if warms_up else [(self._work, run.seconds)]  # seconds without validations
        self._corrected = 0.0  # when, in seconds
        self._validating = 0.0  # seconds of all validations
        self._validation = plan.validation if plan else 0.0  # seconds of the last
        self._whole = plan is None or plan.is_whole
        self._slower = plan.slower if plan and options.model.sampled_softmax > 1 else 1.0

    def count(self, steps_per_epoch: int) -> None:
        """Turn epochs into updates; a run that has a total already keeps it in the place of max_steps."""
        run = self.run
        steps = self.options.trainer.max_steps
        epochs = self.options.trainer.max_epochs
        if steps > 0 and run.total and self.seconds is None:
            steps = run.total
        self._limit(steps if steps > 0 else _ENDLESS)
        if 0 < epochs * steps_per_epoch < self._most:
            self._limit(epochs * steps_per_epoch)
            self.reason = f"max_epochs {epochs} of {steps_per_epoch} steps"

    def check_left(self) -> None:
        """Stopped where no update is left."""
        if self.run.step >= self.run.total:
            done = f"all {self.run.step} steps are done ({self.reason})"
            raise Stopped(f"{done}: ask for more with --trainer.max_steps", 0)

    def begin(self) -> None:
        """Say what is planned, and begin to count the time."""
        plans = [f"{self._most} steps ({self.reason})"] if self._most < _ENDLESS else []
        if self.seconds is not None:
            plans.append(f"{_clock(self.seconds)} of training (max_time)")
        first = ", whichever comes first" if plans[1:] else ""
        report(f"planned: {', '.join(plans)}{first}", prefix="")
        elapsed = self.run.seconds
        if self.minutes is not None:
            self.seconds = elapsed + STARTED + 60 * self.minutes - END_SECONDS - time.perf_counter()
            if self.seconds <= elapsed:
                raise InputError("the time is over before the first step: give more --minutes")
        self._keep_time(elapsed)

    def update(self, elapsed: float) -> None:
        """Count an update, after so many seconds of training and validation."""
        if self.seconds is None:
            return
        run = self.run
        now = elapsed - self._validating
        if self.plan and now < _EVERY * self.seconds:
            return
        marks = self._marks
        late = run.step - early_steps(run.total)  # so many updates have scored larger samples
        self._work += self._slower if late > 0 else 1
        if late == 1 and self.options.model.sampled_softmax > 1:
            marks.clear()  # from here on the speed is another one
        marks.append((self._work, now))
        while len(marks) > 2 and now - marks[1][1] > _RECENT * self.seconds:
            del marks[0]
        first, since = marks[0]
        if self._work > first:
            run.seconds_per_step = (now - since) / (self._work - first)
        self._keep_time(elapsed)

    def paused(self, seconds: float) -> None:
        """Note how long a validation took, with all that came with it."""
        self._validation = seconds
        self._validating += seconds

    def validated(self, loss: float, before: float | None, elapsed: float, ratio: float = 1.0) -> None:
        """Note the loss of a validation, in nats per token, and that of the last one, after so many seconds.

        The best is the one that is the lowest times its `ratio`, which temperature scaling decides.
        Updates follow a planned part of the time, where the loss is the lowest at its end.
        """
        run = self.run
        best = run.best_loss or math.inf
        scaled = ratio * loss
        # A planned run may be above its best for long, while its rate is high: it ends where the curve rises.
        falls = scaled < best if self.minutes is None or before is None else loss < before
        run.stalled = 0 if falls else run.stalled + 1
        if scaled < best:
            run.best_loss = scaled
            run.best_step = run.step
        if self._whole or self.stopped_early or run.step < run.total:
            return
        allowed = self._estimate(elapsed)
        if run.best_step < run.step or allowed < 1.2 * run.step:
            self.reason = f"held-out text was best after step {run.best_step}: longer gained nothing"
            return
        self._whole = allowed < 3 * run.step  # no later part would be as long
        self._limit(allowed if self._whole else 2 * run.step)
        report(f"after step {run.step}: held-out text still gains, {run.total} steps")

    @property
    def stopped_early(self) -> bool:
        """Whether so many validations as are allowed have not improved."""
        patience = self.options.early_stopping
        return patience is not None and self.run.stalled >= patience

    @property
    def is_over(self) -> bool:
        """Whether no update follows."""
        return self.stopped_early or self.run.step >= self.run.total

    @property
    def validates(self) -> bool:
        """Whether a validation follows this update, if there is text for it: none soon before the last."""
        every = self.options.trainer.interval
        is_due = self.run.step % every == 0 and self.run.total - self.run.step > every / 8
        return is_due or self.is_over

    def why(self) -> str:
        """What ended the run."""
        if self.stopped_early:
            return f"early stopping: val_loss was lowest after step {self.run.best_step}"
        return self.reason

    def _limit(self, steps: int) -> None:
        self._most = steps
        self.run.total = steps
        self.reason = f"max_steps {steps}"

    def _keep_time(self, elapsed: float) -> None:
        """Plan for the updates that the time allows; a planned run only where it would miss it by far."""
        run = self.run
        allowed = self.seconds
        if allowed is None:
            return
        estimate = self._estimate(elapsed)
        if self.plan is None:
            run.total = min(self._most, estimate)
            if run.step == estimate < self._most:
                self.reason = f"max_time {_clock(allowed)}"
            return
        if not self._whole:
            estimate = min(estimate, run.total)
        # The updates in question are the last ones, which take longer.
        off = abs(estimate - run.total) * self._slower * (run.seconds_per_step or 0.0)
        since = elapsed - max(self._corrected, _EVERY * allowed)
        if since > _EVERY * allowed and off > _OFF * allowed:
            if not self._corrected:  # the progress bar shows the later ones
                report(f"after step {run.step}: {estimate} steps in the time, not {run.total}")
            self._corrected = elapsed
            self._limit(estimate)

    def _estimate(self, elapsed: float) -> int:
        """The last update before the time is over, after so many seconds of it."""
        left = (self.seconds or 0.0) - elapsed
        step = self.run.step
        speed = self.run.seconds_per_step
        if speed is None:
            return _ENDLESS if left > 0 else step
        every = self.options.trainer.interval
        steps = int(left / speed)
        for _ in range(2):  # those within the updates that they leave; max_time does not count the last
            ahead = (step + steps) // every - (step - 1) // every
            validations = ahead + bool(self.minutes)
            steps = int((left - validations * self._validation) / speed)
        # The last fifth of all updates takes longer.
        mixed = (step + steps) / (1 - LATE + LATE * self._slower)
        return int(max(step, step + steps / self._slower, mixed))


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
