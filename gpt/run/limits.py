"""How many updates a run makes: only `Limits` decides it, and with it the schedule of the learning rate.

Limits of steps and epochs are known from the start. A limit of time is turned into updates after each update,
from the recent speed. A plan may first use only a part of the time, and add parts as long as the held-out
loss falls. The first limit that is reached ends the run. Early stopping, or a held-out loss that keeps
rising, ends it sooner.
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

_ENDLESS = 1 << 53  # updates: the largest whole number that is exact in JSON
_RISES = 3  # consecutive rises of the held-out loss that end a run with a time limit
_RECENT = 0.2  # fraction of the run's time over which its speed is averaged
_LONGER = 1.2  # a further part must allow at least this many times the updates


@dataclass(frozen=True)
class End:
    """The last update that a limit allows, and the words that name the limit."""

    step: int
    why: str


class Speed:
    """How long an update takes, averaged over the last `window` seconds of training without validations.

    Updates in the last fifth of a run may score more tokens and take longer. The unit of work is an early
    update; a late one counts as `slower` units.
    """

    def __init__(self, window: float, slower: float) -> None:
        self.window = window
        self.slower = slower
        self._work = 0.0
        self._marks: list[tuple[float, float]] = []  # (work done in units of early updates, seconds)

    def begin(self, seconds: float) -> None:
        """Start counting now. Without this call it starts after the first update, which may have compiled."""
        self._marks.append((self._work, seconds))

    def update(self, late: int, seconds: float) -> float | None:
        """Count an update and return the seconds of an early one, if known.

        `late` is the update's number within the last fifth of the run.
        """
        self._work += self.slower if late > 0 else 1.0
        if late == 1 and self.slower != 1.0:  # from here on `slower` is measured instead of assumed
            self._marks.clear()
        self._marks.append((self._work, seconds))
        while len(self._marks) > 2 and seconds - self._marks[1][1] > self.window:
            del self._marks[0]
        work, since = self._marks[0]
        return (seconds - since) / (self._work - work) if self._work > work else None

    def last_step(self, step: int, early: float) -> int:
        """Return the run's last update, if after `step` there is time for `early` more early ones."""
        mixed = (step + early) / (1 - LATE + LATE * self.slower)
        all_late = step + early / self.slower
        return int(max(step, mixed, all_late))


class Limits:
    """Keeps `run.total`, the run's number of updates, up to date, and tells in `why()` what ends the run.

    Args:
        options: the run's options; their limits count over all resumes.
        run: where the run stands. A resumed run makes as many updates as its checkpoint says, unless its
            limits were changed.
        plan: the plan of a run with a time limit; its steps are an estimate that the clock corrects.
        deadline: whether the process has to end at a certain time; `begin` receives the time left.
    """

    def __init__(
        self, options: Options, run: RunPart, plan: Plan | None = None, deadline: bool = False
    ) -> None:
        trainer = options.trainer
        self.options = options
        self.run = run
        self.seconds = trainer.max_seconds
        """Limit of seconds of training and validation, over all resumes."""
        if trainer.max_steps == trainer.max_epochs == -1 and self.seconds is None and not deadline:
            raise InputError("the run needs an end: give --trainer.max_steps, max_epochs or max_time")
        self._plan = plan
        self._deadline = deadline
        self._fixed = End(_ENDLESS, "")
        self._part = End(_ENDLESS, "")  # end of the present part of the time
        self._end = self._fixed
        self._speed = Speed(math.inf, 1.0)
        self._validating = 0.0  # seconds of all validations
        self._validation = plan.validation if plan else 0.0  # seconds of the last validation
        self._last_loss = math.inf
        self._rises = 0

    def count(self, steps_per_epoch: int) -> None:
        """Turn the limit of epochs into one of updates."""
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
        """Raise Stopped if no update is left."""
        if self.run.step >= self.run.total:
            done = f"all {self.run.step} steps are done ({self.why()})"
            raise Stopped(f"{done}: ask for more with --trainer.max_steps", 0)

    def begin(self, left: float | None = None) -> None:
        """Print the plan and begin to count the time. With a deadline, `left` seconds remain until it."""
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
        if not (self.options.model.compile or self._deadline):  # both make the first update slow
            self._speed.begin(run.seconds)
        self._keep_time(run.seconds)

    def update(self, elapsed: float) -> None:
        """Count an update; `elapsed` is the seconds of training and validation so far."""
        if self.seconds is None:
            return
        run = self.run
        late = run.step - early_steps(run.total)
        run.seconds_per_step = self._speed.update(late, elapsed - self._validating) or run.seconds_per_step
        self._keep_time(elapsed)

    def paused(self, seconds: float) -> None:
        """Note how long a validation took, including the sample and the checkpoint."""
        self._validation = seconds
        self._validating += seconds

    def validated(self, loss: float, elapsed: float) -> None:
        """Note a validation's loss, in nats per token at its best temperature, after `elapsed` seconds.

        At the end of a part of the time, another part follows if this loss is the lowest so far.
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
        """Whether the run has made its last update."""
        return self._stopped() is not None or self.run.step >= self.run.total

    @property
    def interval(self) -> int:
        """Updates between two validations, twice as many each time a planned run has doubled its length."""
        planned = self.options.trainer.max_steps
        longer = self.run.total // planned if 0 < planned < self.run.total < _ENDLESS else 1
        return self.options.trainer.interval << (longer.bit_length() - 1)

    @property
    def validates(self) -> bool:
        """Whether to validate after this update, if text is held out: at each interval and at the end."""
        is_due = self.run.step % self.interval == 0 and self.run.total - self.run.step > self.interval / 8
        return is_due or self.is_over

    def why(self) -> str:
        """Say what ends the run."""
        return self._stopped() or self._end.why

    def _stopped(self) -> str | None:
        """Say why the held-out loss ends the run now; None if it does not."""
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
        """Set the total to the updates that the time allows, unless another limit comes first."""
        if self.seconds is None:
            return
        limit = "--minutes" if self._deadline else f"max_time {_clock(self.seconds)}"
        in_time = End(self._in_time(elapsed), limit)
        self._take(min(self._fixed, self._part, in_time, key=lambda end: end.step))

    def _in_time(self, elapsed: float) -> int:
        """Return the last update that fits into the time, of which `elapsed` seconds are used."""
        step = self.run.step
        left = (self.seconds or 0.0) - elapsed
        speed = self.run.seconds_per_step
        if left <= 0:
            return step
        if speed is None:
            return self._plan.steps if self._plan else _ENDLESS
        last = self._speed.last_step(step, left / speed)
        for _ in range(2):  # validations take time from updates, and fewer updates need fewer validations
            ahead = last // self.interval - (step - 1) // self.interval
            validations = ahead + self._deadline  # max_time does not count the last validation
            last = self._speed.last_step(step, (left - validations * self._validation) / speed)
        return last

    def _end_part(self, elapsed: float) -> None:
        """At the end of a part, double the run's length, extend it to all the time, or end it."""
        run = self.run
        in_time = self._in_time(elapsed)
        if run.best_step < run.step:
            self._take(
                End(run.step, f"held-out text was best after step {run.best_step}: longer gained nothing")
            )
        elif in_time < _LONGER * run.step:
            self._take(End(run.step, "the rest of the time is too short for a further part"))
        else:
            is_last = in_time < 3 * run.step  # less than another such part would remain
            self._part = End(_ENDLESS, "") if is_last else End(2 * run.step, "a further part of the time")
            self._keep_time(elapsed)
            report(f"after step {run.step}: held-out text still gains, {run.total} steps")


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
