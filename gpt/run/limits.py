"""Decide how many updates a run makes, and with it the schedule of the learning rate: see `Limits`.

| a run                                     | its number of updates, `RunPart.total`                |
| ----------------------------------------- | ----------------------------------------------------- |
| with a limit of steps or epochs           | known from the start                                  |
| with --trainer.max_time                   | estimated again after each update                     |
| tuned from weights for --minutes          | estimated again after each update                     |
| planned for --minutes                     | the same; a short text is read in parts               |
| planned for --minutes, and resumed        | as at its last save; before its last part as above    |

The first limit that is reached ends the run; each is a small class or function:

- steps and epochs, known from the start: `first_of_steps_and_epochs`
- time, turned into updates after each update, from the recent speed: `TimeLimit` (`gpt/run/time_limit.py`)
- parts of a plan's time, of which each follows only if the held-out loss still falls: `next_part`
- a held-out loss that no longer falls brings the end of a plan's time forward: `Limits._cool_down`
- early stopping, which a tuning for --minutes has by default: `LossHistory`

A signal (`gpt/run/signals.py`) or a loss that is not finite (`gpt/training/guard.py`) ends only the process:
the run can be resumed.
"""

import math
from dataclasses import dataclass
from datetime import timedelta

from gpt.errors import InputError
from gpt.plain import LARGEST
from gpt.plan.rule import END_SECONDS, Plan
from gpt.progress import report
from gpt.run.options import Options, TrainerOptions
from gpt.run.signals import Stopped
from gpt.run.time_limit import TimeLimit
from gpt.weights.checkpoint import RunPart

_ENDLESS = LARGEST  # updates
_COOLING = 1.25  # a run whose held-out loss no longer falls ends after this many times its updates so far
_LONGER = 1.2  # a further part must allow at least this many times the updates


@dataclass(frozen=True)
class End:
    """The last update that a limit allows, the words that name the limit, and the option that raises it."""

    step: int
    why: str
    option: str = "trainer.max_steps"


_NO_END = End(_ENDLESS, "")


def next_part(run: RunPart, in_time: int) -> End:
    """Return the end of the part of a plan's time that follows the one that ends now; `_NO_END` for the rest.

    If none follows, the run ends now. `in_time` is the last update that the time allows.
    """
    if run.best_step < run.step:
        best = f"held-out text was best after step {run.best_step}"
        return End(run.step, f"before its time, as {best} and more steps gained nothing")
    if in_time < _LONGER * run.step:
        return End(run.step, "the rest of the time is too short for a further part")
    if in_time < 3 * run.step:  # less than another such part would remain
        return _NO_END
    return End(2 * run.step, "a further part of the time")


class LossHistory:
    """The history of the held-out loss: which update was the best, and whether to go on.

    Args:
        run: where the best loss is kept, and how many validations in a row were not better.
        patience: stop after this many such validations; None for no such limit.
    """

    def __init__(self, run: RunPart, patience: int | None) -> None:
        self.run = run
        self.patience = patience

    def validated(self, loss: float) -> None:
        """Note the held-out loss after `run.step` updates."""
        run = self.run
        is_saved = loss <= LARGEST  # what JSON cannot hold is not: NaN, infinity, and larger numbers
        if is_saved and (run.best_loss is None or loss < run.best_loss):
            run.best_loss = loss
            run.best_step = run.step
            run.stalled = 0
        else:
            run.stalled += 1

    def why_stop(self) -> str | None:
        """Say why the held-out loss ends the run now; None if it does not."""
        run = self.run
        if self.patience is not None and run.stalled >= self.patience:
            return f"early stopping: val_loss was lowest after step {run.best_step}"
        return None


class Limits:
    """All limits of a run.

    They keep `run.total`, the run's number of updates, up to date, and tell in `why()` what ends the run.

    What a checkpoint of a plan's run says of its end:

    | the run, when it was saved      | `is_part` | `total` ends     | a resume                         |
    | ------------------------------- | --------- | ---------------- | -------------------------------- |
    | in a part that is not the last  | True      | this part        | counts the time, may begin parts |
    | in the last or the only part    | False     | the time         | makes the updates up to `total`  |
    | ended                           | False     | with this update | makes none                       |

    Until the speed is known, `_guess` stands for the updates in time: the plan's, or the `total` of a part.

    Args:
        options: the run's options; their limits count over all resumes.
        run: where the run stands. A resumed run makes as many updates as its checkpoint says, unless its
            limits were changed. If these updates are a part of a plan's time, a further part may follow.
        plan: the plan of a run with a time limit; its steps are an estimate that the clock corrects.
        deadline: whether the process has to end at a certain time; `begin` receives the time left.
    """

    def __init__(
        self, options: Options, run: RunPart, plan: Plan | None = None, deadline: bool = False
    ) -> None:
        trainer = options.trainer
        self._has_minutes = deadline or run.is_part
        self.has_time = self._has_minutes or trainer.max_seconds is not None
        """Whether the clock decides how many updates there are."""
        if trainer.max_steps == trainer.max_epochs == -1 and not self.has_time:
            raise InputError("the run needs an end: give --trainer.max_steps, max_epochs or max_time")
        self.options = options
        self.run = run
        self._plan = plan
        self._fixed = _NO_END  # by steps and epochs
        self._time: TimeLimit | None = None  # from `begin` on, when the time left is known
        self._guess = _NO_END  # the last update in time, while the speed is not known
        self._part = _NO_END  # the present part of a plan's time; the last one ends with the time
        if plan:
            run.is_part = not plan.is_whole
            self._guess = End(plan.steps, "as planned")
        if run.is_part:
            self._guess = self._part = End(plan.steps if plan else run.total, "a part of the time")
        self._history = LossHistory(run, options.early_stopping)
        self._cooled = _NO_END  # brought forward: the held-out loss did not fall
        self._end = _NO_END  # the first of these ends

    def set_steps_and_epochs(self, windows_per_epoch: int, windows_per_update: int) -> None:
        """Turn the limits of steps and epochs into one of updates, which have their present size."""
        if self._guess != _NO_END:
            self._take(self._guess)
            return
        self._fixed = first_of_steps_and_epochs(
            self.options.trainer, self.run, windows_per_epoch, windows_per_update
        )
        self._take(self._fixed)

    def check_left(self) -> None:
        """Raise Stopped if no update is left."""
        if self.run.step >= self.run.total:
            done = f"all {self.run.step} steps are done ({self.why()})"
            raise Stopped(f"{done}: ask for more with --{self._end.option}", 0)

    def begin(self, left: float | None = None) -> None:
        """Print the plan and begin to count the time. With a deadline, `left` seconds remain until it."""
        run = self.run
        self._time = self._time_limit(left)
        plans = [f"{self._fixed.step} steps ({self._fixed.why})"] if self._fixed != _NO_END else []
        if self._time:
            option = "--minutes without start and end" if self._has_minutes else "max_time"
            plans.append(f"{_clock(self._time.seconds)} of training ({option})")
        first = ", whichever comes first" if len(plans) > 1 else ""
        report(f"planned: {', '.join(plans)}{first}", prefix="")
        if self._time:
            # It compiles. Or the time counts from the start of the process, whose first update is slow.
            first_is_slow = self.options.model.compile or self._has_minutes
            if not first_is_slow:
                self._time.speed.begin(run.seconds)
            self._keep_time(self._time, run.seconds)

    def update(self, elapsed: float) -> None:
        """Count an update; `elapsed` is the seconds of training and validation so far."""
        if self._time:
            self._time.update(self.run, elapsed)
            self._keep_time(self._time, elapsed)

    def validated(self, loss: float, elapsed: float, seconds: float) -> None:
        """Note a validation: its loss, in nats per token at its best temperature, and how long it took.

        At the end of a part of the time, another part follows if this loss is the lowest so far.
        """
        run = self.run
        self._history.validated(loss)
        if not self._time:
            return
        self._time.validated(seconds)
        if run.stalled and run.step < run.total and self._may_cool_down:
            self._cool_down()
            self._keep_time(self._time, elapsed)
        if self._part.step == run.step and not self._history.why_stop():
            self._part = next_part(run, self._in_time(self._time, elapsed))
            run.is_part = run.step < self._part.step < _ENDLESS
            self._keep_time(self._time, elapsed)
            if run.step < run.total:
                report(f"after step {run.step}: the held-out loss still falls, {run.total} steps")

    @property
    def is_over(self) -> bool:
        """Whether the run has made its last update."""
        return self._history.why_stop() is not None or self.run.step >= self.run.total

    @property
    def interval(self) -> int:
        """Updates between two validations, twice as many each time a planned run has doubled its length."""
        interval = self.options.trainer.interval
        planned = self.options.trainer.max_steps
        if not 0 < planned < self.run.total < _ENDLESS:
            return interval
        times_as_long = self.run.total // planned
        doublings = times_as_long.bit_length() - 1  # the logarithm to base 2, rounded down
        return interval * 2**doublings

    @property
    def validates(self) -> bool:
        """Whether to validate after this update, if text is held out.

        That is at the end, and at each interval except shortly before the end.
        """
        is_due = self.run.step % self.interval == 0 and self.run.total - self.run.step > self.interval / 8
        return is_due or self.is_over

    def why(self) -> str:
        """Say what ends the run."""
        return self._history.why_stop() or self._end.why

    @property
    def _may_cool_down(self) -> bool:
        """Whether a plan fills the time, and its end was not brought forward before."""
        return self._plan is not None and self._plan.is_whole and self._cooled == _NO_END

    def _cool_down(self) -> None:
        """Bring the end forward, as the text is memorised: a falling learning rate still lowers the loss."""
        why = f"before its time, as the held-out loss has not fallen since step {self.run.best_step}"
        self._cooled = End(math.ceil(_COOLING * self.run.step), why)

    def _take(self, end: End) -> None:
        self._end = end
        self.run.total = end.step

    def _keep_time(self, time: TimeLimit, elapsed: float) -> None:
        """Set the total to the updates that the time allows, unless another limit comes first."""
        in_time = End(self._in_time(time, elapsed), time.name)
        self._take(min(self._fixed, self._part, self._cooled, in_time, key=lambda end: end.step))
        if self._end == in_time and self.run.step >= in_time.step:  # no part follows, also after a resume
            self.run.is_part = False

    def _in_time(self, time: TimeLimit, elapsed: float) -> int:
        """Return the last update in time; while nothing is known of the speed, the plan's guess."""
        last = time.last_step(self.run, elapsed, self.interval)
        return self._guess.step if last is None else last

    def _time_limit(self, left: float | None) -> TimeLimit | None:
        """Return the limit of time that a deadline sets, or else the option; None without either."""
        run = self.run
        if left is not None:
            if left <= END_SECONDS:
                raise InputError("the time is over before the first step: give more --minutes")
            seconds = left - END_SECONDS  # it is a new run
            if self._plan:
                run.planned_seconds = seconds
        elif run.is_part and run.planned_seconds is not None:
            seconds = run.planned_seconds
        elif (most := self.options.trainer.max_seconds) is not None:
            # It does not count the last validation.
            return TimeLimit(most, f"max_time {_clock(most)}", includes_last=False)
        else:
            return None
        slower = self._plan.slower if self._plan else 1.0
        validation = self._plan.validation if self._plan else 0.0
        return TimeLimit(seconds, "the time of --minutes is over", slower, validation, includes_last=True)


def first_of_steps_and_epochs(
    options: TrainerOptions, run: RunPart, windows_per_epoch: int, windows_per_update: int
) -> End:
    """Return the first end that the limits of steps and epochs set.

    A run that is resumed may have had another size of updates before: epochs count the windows that it has
    read. A total that is not `max_steps`, without another limit, was planned.
    """
    steps = options.max_steps
    ends = [_NO_END]
    if steps > 0:
        has_other_limit = options.max_epochs > 0 or options.max_seconds is not None
        if run.total in (0, steps) or has_other_limit:
            ends.append(End(steps, f"max_steps {steps}"))
        else:
            ends.append(End(run.total, "as planned at its last save"))
    if options.max_epochs > 0:
        left = options.max_epochs * windows_per_epoch - run.place
        last = run.step + math.ceil(left / windows_per_update)
        ends.append(End(last, f"max_epochs {options.max_epochs}", "trainer.max_epochs"))
    return min(ends, key=lambda end: end.step)


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
