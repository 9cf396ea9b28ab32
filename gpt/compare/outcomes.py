"""Read the results of finished trainings from the files that `gpt fit` writes."""

import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

from gpt.compare.trainings import Training
from gpt.errors import InputError
from gpt.pictures.runs import Metrics
from gpt.plain import parse_json
from gpt.weights.figures import bits_of_best

_PARTS = 5  # parts of a run: steps may take longer in the last fifth


@dataclass(frozen=True)
class Outcome:
    """The result of a run; its numbers are infinite if it diverged."""

    bits: float
    """Bits per byte of the best checkpoint on held-out text."""
    milliseconds: float
    """Milliseconds per step, without validations."""
    curve: dict[int, float]
    """Bits per byte of held-out text, by step."""

    @property
    def is_finite(self) -> bool:
        """Whether the run did not diverge."""
        return math.isfinite(self.bits)


DIVERGED = Outcome(bits=math.inf, milliseconds=math.inf, curve={})
"""The outcome of a run that ended because its loss was not finite."""


def diverged_file(training: Training, folder: Path) -> Path:
    """Return the path of the file that a run leaves if it diverges, as it then has no summary."""
    return folder / "runs" / f"{training.name}.diverged"


def read_outcome(training: Training, folder: Path) -> Outcome | None:
    """Read a run's result; None if it has not ended. InputError if no text was held out."""
    if diverged_file(training, folder).exists():
        return DIVERGED
    run = folder / "runs" / training.name
    try:
        summary = parse_json((run / "summary.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise InputError(f"{run / 'summary.json'}: {error}") from None
    metrics = Metrics.read(run)
    steps, values = metrics.points("step", "val_bits_per_byte")
    if not any(row.get("val_bits_per_byte") for row in metrics.rows):  # "nan" if the run diverged
        raise InputError(f"{run}: no text is held out, give a --data.val_fraction above 0")
    bits = bits_of_best(summary.get("val_bits_per_byte"), summary["val_loss"], summary.get("best_loss"))
    curve = {int(step): value for step, value in zip(steps, values, strict=True)}
    return Outcome(bits or math.inf, milliseconds_per_step(metrics), curve)


def milliseconds_per_step(metrics: Metrics) -> float:
    """Return the milliseconds per step, without the start and validations.

    The first row is skipped, as it includes the start. The result is the mean over five parts of the run of
    the median in each. So moments when the machine was busy do not count, but a slower last fifth does.
    """
    rows = [row for row in metrics.rows if row["tokens_per_second"]]
    seconds = [float(row["tokens"]) / float(row["step"]) / float(row["tokens_per_second"]) for row in rows]
    counted = seconds[1:] or seconds
    parts = min(_PARTS, len(counted))
    edges = [len(counted) * part // parts for part in range(parts + 1)]
    return 1000 * fmean(median(counted[first:last]) for first, last in pairwise(edges))
