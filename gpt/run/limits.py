"""How many updates a run makes: `Limits` alone decides it, and with it the schedule of the learning rate.

Steps and epochs are limits that are known before. A time is one that is estimated after each update, from the
speed of late. A plan may take only a part of the time, and another as long as held-out text gains. The first
of them ends the run; early stopping, and a held-out loss that rises, end it before.
"""

import math
from dataclasses import dataclass
from datetime import timedelta

from gpt.errors import InputError
from gpt.plan.rule import END_SECONDS, Plan
from gpt.progress import report
from gpt.run.options import Options
from gpt.run.signals import Stopped
from gpt.training.sampled import LATE, early_steps
from gpt.weights.checkpoint import RunPart

_ENDLESS = 1 << 53  # updates: JSON's numbers go so far
_RISES = 3  # of the held-out loss, one after the other, end a run for a time
_RECENT = 0.2  # of the time that a run has, over which its speed is averaged
_LONGER = 1.2  # times as many updates, at least, are worth a further part


@dataclass(frozen=True)
class End:
    """The last update that a limit allows, and how the limit is told."""

    step: int
    why: str


class Speed:
    """How long an update takes, over the last `window` seconds of training without validations.

    Updates of the last fifth may score more ids: such a one counts as `slower` of the others, which are
    the unit.
    """

    def __init__(self, window: float, slower: float) -> None:
        self.window = window
        self.slower = slower
        self._work = 0.0
        self._marks: list[tuple[float, float]] = []  # the work done by then, in early updates, and seconds

    def begin(self, seconds: float) -> None:
        """Count from here: without this, from the end of the first update, which may have compiled."""
        self._marks.append((self._work, seconds))

    def update(self, late: int, seconds: float) -> float | None:
        """Count an update, number `late` of the last fifth; return the seconds of an early one, if known."""
        self._work += self.slower if late > 0 else 1.0
        if late == 1 and self.slower != 1.0:  # from here on it is measured and no longer supposed
            self._marks.clear()
        self._marks.append((self._work, seconds))
        while len(self._marks) > 2 and seconds - self._marks[1][1] > self.window:
            del self._marks[0]
        work, since = self._marks[0]
        return (seconds - since) / (self._work - work) if self._work > work else None

    def last_step(self, step: int, early: float) -> int:
        """The last update of a run, where after `step` there is time for so many `early` ones."""
        mixed = (step + early) / (1 - LATE + LATE * self.slower)
        all_late = step + early / self.slower
        return int(max(step, mixed, all_late))


class Limits:
    """Decides `run.total`, the number of updates, at each moment, and `why()`.

    Args:
        options: limits among them, which count over all resumes.
        run: a resumed one makes the updates that its checkpoint says, unless its limits were changed.
        plan: whose steps are a guess, which the clock corrects.
        deadline: whether the process has to end at a time, which `begin` is told.
    """

    def __init__(
        self, options: Options, run: RunPart, plan: Plan | None = None, deadline: bool = False
    ) -> None:
        trainer = options.trainer
        self.options = options
        self.run = run
        self.seconds = trainer.max_seconds
        """Of training and validation, over all resumes."""
        if trainer.max_steps == trainer.max_epochs == -1 and self.seconds is None and not deadline:
            raise InputError("the run needs an end: give --trainer.max_steps, max_epochs or max_time")
        self._plan = plan
        self._deadline = deadline
        self._fixed = End(_ENDLESS, "")
        self._part = End(_ENDLESS, "")  # of the time, until held-out text shows whether more gains
        self._end = self._fixed
        self._speed = Speed(math.inf, 1.0)
        self._validating = 0.0  # seconds of all validations
        self._validation = plan.validation if plan else 0.0  # seconds of the last
        self._last_loss = math.inf
        self._rises = 0

    def count(self, steps_per_epoch: int) -> None:
        """Turn epochs into updates."""
        run = self.run
        trainer = self.options.trainer
        if self._plan:
            if not self._plan.is_whole:
                self._part = End(self._plan.steps, "the first part of the time")
            self._take(End(self._plan.steps, "a guess"))
            return
        ends = [self._fixed]
        if run.total and trainer.max_steps > 0 and self.seconds is None:
            as_planned = run.total != trainer.max_steps
            ends.append(End(run.total, f"{'as planned' if as_planned else 'max_steps'} {run.total}"))
        elif trainer.max_steps > 0:
            ends.append(End(trainer.max_steps, f"max_steps {trainer.max_steps}"))
        if trainer.max_epochs > 0:
            steps = trainer.max_epochs * steps_per_epoch
            ends.append(End(steps, f"max_epochs {trainer.max_epochs} of {steps_per_epoch} steps"))
        self._fixed = min(ends, key=lambda end: end.step)
        self._take(self._fixed)

    def check_left(self) -> None:
        """Stopped where no update is left."""
        if self.run.step >= self.run.total:
            done = f"all {self.run.step} steps are done ({self.why()})"
            raise Stopped(f"{done}: ask for more with --trainer.max_steps", 0)

    def begin(self, left: float | None = None) -> None:
        """Say what is planned, and begin to count the time; with a deadline so many seconds are `left`."""
        run = self.run
        if left is not None:
            self.seconds = run.seconds + left - END_SECONDS
            if self.seconds <= run.seconds:
                raise InputError("the time is over before the first step: give more --minutes")
        plans = [f"{self._fixed.step} steps ({self._fixed.why})"] if self._fixed.step < _ENDLESS else []
        if self.seconds is not None:
            option = "max_time" if left is None else "minutes"
            plans.append(f"{_clock(self.seconds)} of training ({option})")
        first = ", whichever comes first" if plans[1:] else ""
        report(f"planned: {', '.join(plans)}{first}", prefix="")
        if self.seconds is None:
            return
        slower = self._plan.slower if self._plan else 1.0
        self._speed = Speed(_RECENT * self.seconds, slower)
        if not (self.options.model.compile or self._deadline):  # whose first update is slow
            self._speed.begin(run.seconds)
        self._keep_time(run.seconds)

    def update(self, elapsed: float) -> None:
        """Count an update, after so many seconds of training and validation."""
        if self.seconds is None:
            return
        run = self.run
        late = run.step - early_steps(run.total)
        run.seconds_per_step = self._speed.update(late, elapsed - self._validating) or run.seconds_per_step
        self._keep_time(elapsed)

    def paused(self, seconds: float) -> None:
        """Note how long a validation took, with all that came with it."""
        self._validation = seconds
        self._validating += seconds

    def validated(self, loss: float, elapsed: float) -> None:
        """Note the loss of a validation, in nats per token at its best temperature, after so many seconds.

        A further part of the time follows, if the loss is the lowest so far at the end of one.
        """
        run = self.run
        self._rises = 0 if loss < self._last_loss else self._rises + 1
        self._last_loss = loss
        if run.best_loss is None or loss < run.best_loss:
            run.best_loss = loss
            run.best_step = run.step
            run.stalled = 0
        else:
            run.stalled += 1
        if self._part.step == run.step and not self._stopped():
            self._end_part(elapsed)

    @property
    def is_over(self) -> bool:
        """Whether no update follows."""
        return self._stopped() is not None or self.run.step >= self.run.total

    @property
    def interval(self) -> int:
        """Updates between two validations: twice as many where a planned run has become twice as long."""
        planned = self.options.trainer.max_steps
        longer = self.run.total // planned if 0 < planned < self.run.total < _ENDLESS else 1
        return self.options.trainer.interval << (longer.bit_length() - 1)

    @property
    def validates(self) -> bool:
        """Whether a validation follows this update, if there is text for it: none soon before the last."""
        is_due = self.run.step % self.interval == 0 and self.run.total - self.run.step > self.interval / 8
        return is_due or self.is_over

    def why(self) -> str:
        """What ends the run."""
        return self._stopped() or self._end.why

    def _stopped(self) -> str | None:
        """What of held-out text ends the run at once."""
        run = self.run
        patience = self.options.early_stopping
        if patience is not None and run.stalled >= patience:
            return f"early stopping: val_loss was lowest after step {run.best_step}"
        if self._deadline and self._rises >= _RISES:
            return f"val_loss rose {_RISES} times in a row: it was lowest after step {run.best_step}"
        return None

    def _take(self, end: End) -> None:
        self._end = end
        self.run.total = end.step

    def _keep_time(self, elapsed: float) -> None:
        """Make the updates that the time allows, if no other limit comes before."""
        if self.seconds is None:
            return
        limit = "--minutes" if self._deadline else f"max_time {_clock(self.seconds)}"
        in_time = End(self._in_time(elapsed), limit)
        self._take(min(self._fixed, self._part, in_time, key=lambda end: end.step))

    def _in_time(self, elapsed: float) -> int:
        """The last update before the time is over, after so many seconds of it."""
        step = self.run.step
        left = (self.seconds or 0.0) - elapsed
        speed = self.run.seconds_per_step
        if left <= 0:
            return step
        if speed is None:
            return self._plan.steps if self._plan else _ENDLESS
        last = self._speed.last_step(step, left / speed)
        for _ in range(2):  # validations on the way leave fewer updates, which have fewer validations
            ahead = last // self.interval - (step - 1) // self.interval
            validations = ahead + self._deadline  # max_time does not count the last
            last = self._speed.last_step(step, (left - validations * self._validation) / speed)
        return last

    def _end_part(self, elapsed: float) -> None:
        """At the end of a part go on for as long again, or end."""
        run = self.run
        in_time = self._in_time(elapsed)
        if run.best_step < run.step:
            self._take(
                End(run.step, f"held-out text was best after step {run.best_step}: longer gained nothing")
            )
        elif in_time < _LONGER * run.step:
            self._take(End(run.step, "the rest of the time is too short for a further part"))
        else:
            is_last = in_time < 3 * run.step  # no later part would be as long
            self._part = End(_ENDLESS, "") if is_last else End(2 * run.step, "a further part of the time")
            self._keep_time(elapsed)
            report(f"after step {run.step}: held-out text still gains, {run.total} steps")


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
