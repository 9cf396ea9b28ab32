"""Compute a comparison's result: differences from the base with their intervals, as numbers and text."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from gpt.compare.interval import Interval, Table, paired_interval
from gpt.compare.outcomes import Outcome
from gpt.compare.trainings import Candidate, Text, Training
from gpt.compare.variants import Variant
from gpt.plain import JsonObject
from gpt.progress import aligned

_UNSTEADY = 0.1  # largest half-width of the interval of log(time per step) for a steady speed
Outcomes = Mapping[Training, Outcome]


@dataclass(frozen=True)
class Design:
    """The design of a comparison: every candidate, the base first, on every text with every seed."""

    candidates: tuple[Candidate, ...]
    texts: tuple[Text, ...]
    seeds: tuple[int, ...]
    steps: int

    @property
    def base(self) -> Candidate:
        """The candidate that the others are compared with."""
        return self.candidates[0]

    def trainings(self) -> list[Training]:
        """Return all trainings, candidates interleaved, so that changes of the machine's speed affect all."""
        trainings = []
        order = list(self.candidates)
        for seed in self.seeds:
            for text in self.texts:
                trainings += [Training(candidate, text, seed, self.steps) for candidate in order]
                order.reverse()
        return trainings + [self.shorter(text) for text in self.texts]

    def shorter(self, text: Text) -> Training:
        """Return the base with half the steps, which shows how much steps gain on this text."""
        return Training(self.base, text, self.seeds[0], self.steps // 2)

    def table(self, outcomes: Outcomes, candidate: Candidate) -> list[list[Outcome]]:
        """Return the outcomes of the candidate's trainings: a row for each text, with one for each seed."""
        return [
            [outcomes[Training(candidate, text, seed, self.steps)] for seed in self.seeds]
            for text in self.texts
        ]


@dataclass(frozen=True)
class Difference:
    """The differences of a candidate's runs from the base's runs of the same text and seed.

    They are differences of logarithms, so -0.02 is 2 % less. Tables have a row per text, a number per seed.
    """

    bits: Table
    """Bits per byte after the same steps."""
    time: Table
    """Time of a step."""
    equal_time: Table
    """Bits per byte after the same time."""


def doubling(design: Design, outcomes: Outcomes, text: Text) -> float:
    """Return the change of log bits per byte by twice the steps on this text; below 0 if they help."""
    short = design.shorter(text)
    whole = Training(design.base, text, design.seeds[0], design.steps)
    gained = math.log(outcomes[whole].bits / outcomes[short].bits)
    return gained / math.log2(whole.steps / short.steps)


def difference(design: Design, outcomes: Outcomes, candidate: Candidate) -> Difference | None:
    """Return the candidate's differences from the base; None if a run diverged."""
    own = design.table(outcomes, candidate)
    base = design.table(outcomes, design.base)
    if not all(outcome.is_finite for row in own for outcome in row):
        return None
    bits = log_ratios(own, base, lambda outcome: outcome.bits)
    time = log_ratios(own, base, lambda outcome: outcome.milliseconds)
    equal_time = []
    for text, of_bits, of_time in zip(design.texts, bits, time, strict=True):
        # If a step takes twice the time, half the steps fit, and the gain of a doubling is lost.
        worth = doubling(design, outcomes, text) / math.log(2)
        equal_time.append([b - worth * t for b, t in zip(of_bits, of_time, strict=True)])
    return Difference(bits, time, equal_time)


def log_ratios(
    own: Sequence[Sequence[Outcome]], base: Sequence[Sequence[Outcome]], value: Callable[[Outcome], float]
) -> list[list[float]]:
    """Return log(own / base) of a value of each outcome in two tables of the same texts and seeds."""
    return [
        [math.log(value(outcome) / value(beside)) for outcome, beside in zip(row, base_row, strict=True)]
        for row, base_row in zip(own, base, strict=True)
    ]


def lines(design: Design, outcomes: Outcomes) -> list[str]:
    """Return the result as lines for a terminal."""
    base = design.base.variant.name
    differences = {candidate: difference(design, outcomes, candidate) for candidate in design.candidates[1:]}
    seeds = len(design.seeds)
    verdicts: list[str] = []
    for candidate, measured in differences.items():
        verdicts += verdict(candidate.variant.name, base, measured, seeds)
    worth = fmean(doubling(design, outcomes, text) for text in design.texts)
    return [
        f"{', '.join(text.name for text in design.texts)}: {design.steps} steps, "
        f"seeds {design.seeds[0]} to {design.seeds[-1]}",
        "",
        *aligned(_rows(design, outcomes, differences)),
        "",
        *([*aligned(_rows_by_text(design, outcomes, differences)), ""] if len(design.texts) > 1 else []),
        *verdicts,
        "",
        "Lower is better. Brackets: 95 % intervals of the mean difference between runs of the same seed.",
        f"The same time is computed from the time of a step: twice the steps change the bits of {base}",
        f"by {percent(worth)} ({design.steps // 2} and {design.steps} steps).",
    ]


def _rows(
    design: Design, outcomes: Outcomes, differences: Mapping[Candidate, Difference | None]
) -> list[tuple[str, ...]]:
    """Return one row per variant: means over texts and seeds, and differences from the base."""
    header = ("variant", "bits per byte", "in the same steps", "ms a step", "in the same time")
    rows: list[tuple[str, ...]] = [header]
    for candidate in design.candidates:
        made = [outcome for row in design.table(outcomes, candidate) for outcome in row]
        bits = fmean(outcome.bits for outcome in made)
        time = fmean(outcome.milliseconds for outcome in made)
        measured = differences.get(candidate)
        same = percent(paired_interval(measured.bits)) if measured else ""
        equal = percent(paired_interval(measured.equal_time)) if measured else ""
        rows.append((candidate.variant.name, f"{bits:.4f}", same, f"{time:.1f}", equal))
    return rows


def _rows_by_text(
    design: Design, outcomes: Outcomes, differences: Mapping[Candidate, Difference | None]
) -> list[tuple[str, ...]]:
    """Return one row per text: the base's result, and each variant's mean difference."""
    names = [candidate.variant.name for candidate in design.candidates]
    rows: list[tuple[str, ...]] = [("text, in the same steps", *names)]
    of_base = design.table(outcomes, design.base)
    for number, text in enumerate(design.texts):
        base = fmean(outcome.bits for outcome in of_base[number])
        means = [
            percent(fmean(measured.bits[number])) if measured else "diverged"
            for measured in differences.values()
        ]
        rows.append((text.name, f"{base:.4f}", *means))
    return rows


def verdict(name: str, base: str, difference: Difference | None, seeds: int) -> list[str]:
    """Return lines that state what the numbers show about a variant."""
    if difference is None:
        return [f"{name} diverged: its loss is no number"]
    in_time = _better(paired_interval(difference.equal_time), seeds)
    time = paired_interval(difference.time)
    if time.half > _UNSTEADY:
        differs = f"the time of a step differs by {percent(time)}"
        in_time = f"nothing can be said, {differs}: is the machine busy?"
    return [
        f"{name} beside {base}",
        f"  in the same steps: {_better(paired_interval(difference.bits), seeds)}",
        f"  in the same time: {in_time}",
    ]


def as_json(design: Design, outcomes: Outcomes) -> JsonObject:
    """Return the result for JSON: every run, and the differences as fractions with their intervals."""
    variants = []
    for candidate in design.candidates:
        measured = None if candidate is design.base else difference(design, outcomes, candidate)
        variants.append(
            {
                **described(candidate.variant),
                "same_steps": _fractions(measured.bits) if measured else None,
                "milliseconds": _fractions(measured.time) if measured else None,
                "same_time": _fractions(measured.equal_time) if measured else None,
            }
        )
    return {
        "steps": design.steps,
        "seeds": list(design.seeds),
        "texts": [text.corpus for text in design.texts],
        "doubling": [math.expm1(doubling(design, outcomes, text)) for text in design.texts],
        "variants": variants,
        "runs": [
            {
                "run": training.name,
                "variant": training.candidate.variant.name,
                "text": training.text.name,
                "seed": training.seed,
                "steps": training.steps,
                "bits_per_byte": _finite(outcome.bits),
                "milliseconds_per_step": _finite(outcome.milliseconds),
            }
            for training, outcome in outcomes.items()
        ],
    }


def described(variant: Variant) -> JsonObject:
    """Return for JSON what tells one variant from another."""
    return {"name": variant.name, "words": list(variant.words), "source": str(variant.source)}


def _finite(value: float) -> float | None:
    """Return the number; None if JSON cannot hold it."""
    return value if math.isfinite(value) else None


def percent(value: Interval | float) -> str:
    """Format a difference of logarithms as a percentage, with the ends of its interval."""
    if isinstance(value, Interval):
        return f"{percent(value.mean)} ({_number(value.low)} to {_number(value.high)})"
    return f"{_number(value)} %"


def _number(logarithm: float) -> str:
    if logarithm > math.log(10):  # with few seeds an interval can be arbitrarily wide
        return "more"
    value = 100 * math.expm1(logarithm)
    return f"{value:+.2f}" if abs(value) < 1 else f"{value:+.1f}"


def _better(interval: Interval, seeds: int) -> str:
    if not interval.is_certain:
        return f"no difference can be seen with {seeds} seeds"
    amount = f"{_number(interval.mean).lstrip('+-')} %"
    return f"{'better' if interval.mean < 0 else 'worse'} by {amount}"


def _fractions(differences: Table) -> dict[str, float]:
    interval = paired_interval(differences)
    ends = {"mean": interval.mean, "low": interval.low, "high": interval.high}
    return {name: math.expm1(min(value, 700.0)) for name, value in ends.items()}
