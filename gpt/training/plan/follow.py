"""Keeping a planned run on time: its number of steps follows the speed that the machine turns out to have."""

import time
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, Trainer

from gpt.errors import InputError
from gpt.training.ends import Ends
from gpt.training.output import report

_OFF = 0.01  # of the time: less is not corrected
_EVERY = 0.05  # of the time: between two corrections, and before the first
_RECENT = 0.2  # of the time: the speed is that of so much at most


class FollowPlan(Callback):
    """Changes the number of steps where the plan asks for it, or where the run would miss its `deadline`.

    Each change is kept in the option `planned_steps`, as STEP:TOTAL: the run resumes and repeats exactly.

    Args:
        changes: the option.
        save: is called with the option when it has changed.
        deadline: when training has to end, as `time.perf_counter` counts; None changes nothing by itself.
        validation: seconds that one is expected to take.
    """

    def __init__(
        self,
        changes: str,
        ends: Ends,
        save: Callable[[str], None],
        deadline: float | None = None,
        validation: float = 0.0,
    ) -> None:
        try:
            self.changes = {int(at): int(to) for at, _, to in (c.partition(":") for c in changes.split(","))}
        except ValueError:
            raise InputError(f"planned_steps {changes}: expected STEP:TOTAL,STEP:TOTAL") from None
        self.ends, self.save, self.deadline = ends, save, deadline
        self._step, self._began, self._allowed = 0, 0.0, 0.0
        self._validation_began, self._validation, self._validating = 0.0, validation, 0.0
        self._corrected = 0.0  # when, in seconds
        self._marks: list[tuple[int, float]] = []  # steps, and seconds of training without validation

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Plan for the total that was the last one so far."""
        self._step = trainer.global_step
        total = [total for step, total in sorted(self.changes.items()) if step <= self._step][-1]
        self.ends.move(trainer, pl_module, total)
        self._began = time.perf_counter()
        self._allowed = (self.deadline or 0.0) - self._began

    def on_validation_start(self, *_: Any) -> None:
        """Note the time."""
        self._validation_began = time.perf_counter()

    def on_validation_end(self, *_: Any) -> None:
        """Note how long it took, with the sample."""
        self._validation = time.perf_counter() - self._validation_began
        self._validating += self._validation

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        """After an update, change the total if need be."""
        step = trainer.global_step
        if step == self._step:
            return
        self._step = step
        if self.deadline is not None and not trainer.should_stop:
            total = self._total_in_time(trainer, pl_module.planned_steps)
            if total != pl_module.planned_steps:
                self.changes[step] = total
                self.save(",".join(f"{at}:{to}" for at, to in sorted(self.changes.items())))
                report(f"after step {step}: {total} steps in the time, not {pl_module.planned_steps}")
        if step in self.changes:
            self.ends.move(trainer, pl_module, self.changes[step])

    def _total_in_time(self, trainer: Trainer, planned: int) -> int:
        """The planned number of steps, or another one where that would miss the deadline by far."""
        elapsed = time.perf_counter() - self._began
        self._marks.append((self._step, elapsed - self._validating))
        while self._marks[-1][1] - self._marks[1 if len(self._marks) > 2 else 0][1] > _RECENT * self._allowed:
            del self._marks[0]
        (first, began), (step, now) = self._marks[0], self._marks[-1]
        if step == first or elapsed < self._corrected + _EVERY * self._allowed:
            return planned
        every = int(trainer.val_check_interval or planned) // trainer.accumulate_grad_batches
        validations = -(-planned // every) - step // every
        left = self._allowed - elapsed - validations * self._validation
        a_step = (now - began) / (step - first)
        total = max(step, step + int(left / a_step))
        if abs(total - planned) * a_step < _OFF * self._allowed:
            return planned
        self._corrected = elapsed
        return total
