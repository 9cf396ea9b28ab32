"""The beginning of a run: `gpt.run.start` finds it, and the run's parts read it."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from gpt.data.prepared import Prepared
from gpt.data.split import Divided
from gpt.plan.rule import Plan
from gpt.run.folder import Claim
from gpt.run.options import Options
from gpt.text.tokenizer import Tokenizer
from gpt.weights.checkpoint import Checkpoint, RunPart
from gpt.weights.load import StoredModel

T = TypeVar("T")


class HandedOn(Generic[T]):
    """A value that was read on the way to a run, for whoever needs it next; None if nothing was read.

    `take` gives it away, so that its memory is free again as soon as its taker has used it.
    """

    def __init__(self, value: T | None = None) -> None:
        self._value = value

    def take(self) -> T | None:
        """Return the value, the first time; then None."""
        value = self._value
        self._value = None
        return value


@dataclass(frozen=True, kw_only=True)
class Origin:
    """All that a run begins with: from scratch, from weights to tune, or from a checkpoint."""

    options: Options
    tokenizer: Tokenizer | None = None
    """The tokenizer of the weights or the checkpoint; None if the vocabulary comes from the options."""
    weights: HandedOn[StoredModel] = field(default_factory=HandedOn, compare=False)
    """The weights that are tuned, as they were read."""
    text: HandedOn[Divided | Prepared] = field(default_factory=HandedOn, compare=False)
    """The corpus, as it was divided or prepared to plan the run."""
    checkpoint: Checkpoint | None = None
    """The checkpoint that is resumed or validated."""
    run: RunPart = field(default_factory=RunPart)
    """The state of the run."""
    folder: Path | None = None
    """The run's folder, if it has one."""
    plan: Plan | None = None
    """The plan made for --minutes."""
    began: float = 0.0
    """When the process began, in seconds by `time.perf_counter`; 0 in a resumed run."""
    minutes: float | None = None
    """Minutes after `began` when the run has to end."""
    chose_early_stopping: bool = False
    """Whether early stopping is a default, which holds only where text is held out."""
    claim: Claim = field(default_factory=Claim, compare=False)
    """The folder that this process has locked."""

    @property
    def is_timed_tuning(self) -> bool:
        """Whether given weights are tuned for --minutes."""
        return self.minutes is not None and self.plan is None

    @property
    def left(self) -> float | None:
        """Seconds until the run has to end; None without a time limit."""
        return None if self.minutes is None else self.began + 60 * self.minutes - time.perf_counter()
