"""Means and 95 % confidence intervals of differences between runs with the same text and seed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

CONFIDENCE = 0.95
Table = Sequence[Sequence[float]]
"""A row for each text, with a number for each seed."""


@dataclass(frozen=True)
class Interval:
    """A mean, and half the width of its 95 % confidence interval."""

    mean: float
    half: float

    @property
    def low(self) -> float:
        """The lower end."""
        return self.mean - self.half

    @property
    def high(self) -> float:
        """The upper end."""
        return self.mean + self.half

    @property
    def is_certain(self) -> bool:
        """Whether the interval excludes zero, so that the difference is significant."""
        return self.low > 0 or self.high < 0


def paired_interval(differences: Table) -> Interval:
    """Return the mean of paired differences over texts and seeds, with its interval for exactly these texts.

    Differences between texts are not noise. The noise is the spread of seeds around the mean of their text,
    pooled over the texts. With one text this is the paired t-test. There have to be at least two seeds.
    """
    texts = len(differences)
    seeds = len(differences[0])
    if seeds < 2:
        raise ValueError("one seed says nothing of the scatter")
    means = [fmean(row) for row in differences]
    squares = sum((value - mean) ** 2 for row, mean in zip(differences, means, strict=True) for value in row)
    degrees = texts * (seeds - 1)
    error = math.sqrt(squares / degrees / (texts * seeds))
    return Interval(fmean(means), student_t(degrees) * error)


def student_t(degrees: int) -> float:
    """Return the t for which Student's distribution has probability `CONFIDENCE` between -t and t."""
    low = 0.0
    high = 1.0
    while probability_within(high, degrees) < CONFIDENCE:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        if probability_within(middle, degrees) < CONFIDENCE:
            low = middle
        else:
            high = middle
    return high


def probability_within(t: float, degrees: int) -> float:
    """Return the probability of |T| < t in Student's distribution, with a whole number of degrees of freedom.

    Finite sums of Abramowitz and Stegun 1964, 26.7.3 and 26.7.4, in theta = atan(t / sqrt(degrees)).
    """
    theta = math.atan(t / math.sqrt(degrees))
    square = math.cos(theta) ** 2
    is_odd = degrees % 2
    term = math.cos(theta) if is_odd else 1.0
    total = 0.0
    for power in range(2 + is_odd, degrees + 1, 2):
        total += term
        term *= (power - 1) / power * square
    if is_odd:
        return 2 / math.pi * (theta + math.sin(theta) * total)
    return math.sin(theta) * total
