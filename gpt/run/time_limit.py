"""Turn a limit of time into a number of updates, from the speed of the last seconds."""

from gpt.training.sampled import LATE, early_steps
from gpt.weights.checkpoint import RunPart

_RECENT = 0.2  # fraction of the run's time over which its speed is averaged


class Speed:
    """The time of an update, averaged over the last `window` seconds of training without validations.

    Updates in the last fifth of a run may score more tokens and take longer. The unit of work is an early
    update; a late one counts as `slower` units.
    """

    def __init__(self, window: float, slower: float) -> None:
        self.window = window
        self.slower = slower
        self._work = 0.0
        self._is_late = False
        self._marks: list[tuple[float, float]] = []  # (work done in units of early updates, seconds)

    def begin(self, seconds: float) -> None:
        """Start counting now. Without this call it starts after the first update, which may have compiled."""
        self._marks.append((self._work, seconds))

    def update(self, late_steps: int, seconds: float) -> float | None:
        """Count an update and return the seconds of an early one, if known.

        `late_steps` are the run's updates so far minus its early ones: 1 for the first late update, and 0 or
        less for the early ones.
        """
        self._work += self.slower if late_steps > 0 else 1.0
        if late_steps > 0 and not self._is_late and self.slower != 1.0:
            self._marks.clear()  # from here on `slower` is measured instead of assumed
        self._is_late = late_steps > 0
        self._marks.append((self._work, seconds))
        while len(self._marks) > 2 and seconds - self._marks[1][1] > self.window:
            del self._marks[0]
        work, since = self._marks[0]
        return (seconds - since) / (self._work - work) if self._work > work else None

    def last_step(self, step: int, early: float) -> int:
        """Return the run's last update, if after `step` there is time for `early` more early ones."""
        # Before the first late update: a run of `last` updates is as much work as
        # (1 - LATE) * last + slower * LATE * last early ones.
        last = (step + early) / (1 - LATE + LATE * self.slower)
        # From then on that gives too few, and all updates to come are late. The other way round, this gives
        # too few before.
        all_late = step + early / self.slower
        return int(max(step, last, all_late))


class TimeLimit:
    """A limit of time. After each update it estimates which one is the last in time.

    Args:
        seconds: limit of seconds of training and validation, over all resumes.
        name: how `Limits.why` names it.
        slower: how many times as long an update of the last fifth takes, as the plan supposes.
        validation: seconds of a validation, as the plan supposes.
        includes_last: whether the validation after the last update has to fit into the time, too.
    """

    def __init__(
        self, seconds: float, name: str, slower: float = 1.0, validation: float = 0.0, *, includes_last: bool
    ) -> None:
        self.seconds = seconds
        self.name = name
        self.speed = Speed(_RECENT * seconds, slower)
        self._validation = validation  # seconds of the last validation
        self._all_validations = 0.0  # their seconds together
        self._includes_last = includes_last

    def update(self, run: RunPart, elapsed: float) -> None:
        """Measure an update; `elapsed` is the seconds of training and validation so far."""
        late_steps = run.step - early_steps(run.total)
        seconds = self.speed.update(late_steps, elapsed - self._all_validations)
        run.seconds_per_step = seconds or run.seconds_per_step

    def validated(self, seconds: float) -> None:
        """Note how long a validation took, including its sample."""
        self._validation = seconds
        self._all_validations += seconds

    def last_step(self, run: RunPart, elapsed: float, interval: int) -> int | None:
        """Return the last update that fits into the time; None while nothing is known of the speed.

        `interval` is the number of updates between two validations. These take time from updates, and fewer
        updates need fewer validations: so the estimate is made without them, and then corrected twice.
        """
        step = run.step
        left = self.seconds - elapsed
        if left <= 0:
            return step
        if run.seconds_per_step is None:
            return None
        last = self.speed.last_step(step, left / run.seconds_per_step)
        for _ in range(2):
            ahead = last // interval - (step - 1) // interval  # with one that is due after this update
            validations = ahead + self._includes_last
            training = left - validations * self._validation
            last = self.speed.last_step(step, training / run.seconds_per_step)
        return last
