"""Draw a comparison: curves with the spread over seeds, and differences with their intervals."""

import math
from itertools import cycle
from statistics import fmean
from typing import TYPE_CHECKING

from gpt.compare.interval import Interval, paired_interval
from gpt.compare.result import Design, Outcomes, log_ratios
from gpt.compare.trainings import Candidate
from gpt.pictures.figures import finish, legend_label
from gpt.pictures.runs import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BAND = 0.2  # opacity of the spread over seeds


def draw(design: Design, outcomes: Outcomes) -> "Figure":
    """Draw bits per byte over steps (left) and each variant's difference from the base in % (right)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for candidate, colour in zip(design.candidates, cycle(COLOURS)):
        steps = common_steps(design, outcomes, candidate)
        name = legend_label(candidate.variant.name)
        _draw_band(left, steps, _spread(design, outcomes, candidate, steps), colour, name)
        if candidate is design.base:
            right.axhline(0, color=colour, linewidth=2.0, label=name)
        else:
            percents = [
                (_percent(interval.mean), _percent(interval.low), _percent(interval.high))
                for interval in differences(design, outcomes, candidate, steps)
            ]
            _draw_band(right, steps, percents, colour, name)
    left.set_title("Mean, and from the best seed to the worst", fontsize=11)
    left.set_ylabel("bits per byte of held-out text")
    right.set_title("Mean difference, with its 95 % interval", fontsize=11)
    right.set_ylabel("bits per byte, % from the base; below 0 is better")
    for axes in (left, right):
        finish(axes, "step")
    return figure


def common_steps(design: Design, outcomes: Outcomes, candidate: Candidate) -> list[int]:
    """Return the steps after which every run of the candidate and the base has a finite validation."""
    rows = design.table(outcomes, candidate) + design.table(outcomes, design.base)
    return sorted(set.intersection(*(set(outcome.curve) for row in rows for outcome in row)))


def differences(design: Design, outcomes: Outcomes, candidate: Candidate, steps: list[int]) -> list[Interval]:
    """Return the interval of the difference from the base, in logarithms, after each of the steps."""
    own = design.table(outcomes, candidate)
    base = design.table(outcomes, design.base)

    def interval(step: int) -> Interval:
        return paired_interval(log_ratios(own, base, lambda outcome: outcome.curve[step]))

    return [interval(step) for step in steps]


def _draw_band(
    axes: "Axes", steps: list[int], values: list[tuple[float, float, float]], colour: str, name: str
) -> None:
    """Draw, after each step, a mean as a line and the range from a low to a high value as a band."""
    means, low, high = zip(*values, strict=True) if values else ((), (), ())
    axes.plot(steps, means, color=colour, linewidth=2.0, marker="o", markersize=4.5, label=name)
    axes.fill_between(steps, low, high, color=colour, alpha=_BAND, linewidth=0)


def _spread(
    design: Design, outcomes: Outcomes, candidate: Candidate, steps: list[int]
) -> list[tuple[float, float, float]]:
    """Return, after each step, the mean over texts and seeds, the best seed's and the worst seed's."""
    spread = []
    seeds = list(zip(*design.table(outcomes, candidate), strict=True))  # the outcomes on all texts
    for step in steps:
        of_seeds = [fmean(outcome.curve[step] for outcome in of_texts) for of_texts in seeds]
        spread.append((fmean(of_seeds), min(of_seeds), max(of_seeds)))
    return spread


def _percent(logarithm: float) -> float:
    return 100 * math.expm1(min(logarithm, 1.0))  # wider bands would exceed the picture anyway
