"""`gpt plan`: what a text needs and what it can give, in a table by the time one has; nothing is trained."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from gpt import STARTED
from gpt.errors import InputError
from gpt.training.device import default_precision, keep_freed_memory
from gpt.training.plan.cost import probe
from gpt.training.plan.law import Law
from gpt.training.plan.plan import GIVEN, Plan, choose, is_worth
from gpt.training.plan.text import measure

_READING = ("text_column", "errors")
PLANNED_AROUND = (
    *(*GIVEN, "data.corpus", "data.vocabulary", "trainer.accelerator", "trainer.precision"),
    *(f"data.{name}" for name in _READING),
)
_REST_OF_START = 3.0  # seconds from the plan to the first step, without tokenizing


@dataclass(frozen=True, kw_only=True)
class GivenConfig:
    """Numbers of the model to plan around; None leaves them to the plan."""

    vocab_size: int | None = None
    context_length: int | None = None
    emb_dim: int | None = None
    num_heads: int | None = None
    num_layers: int | None = None


@dataclass(frozen=True, kw_only=True)
class GivenModel:
    """The model to plan around."""

    config: GivenConfig = field(default_factory=GivenConfig)


@dataclass(frozen=True, kw_only=True)
class GivenData:
    """The text, and what is decided about it."""

    corpus: str = "python-docs"
    vocabulary: str | None = None
    val_fraction: float | None = None
    batch_size: int | None = None
    text_column: str | None = None
    errors: str | None = None


def plan(
    data: GivenData = GivenData(), model: GivenModel = GivenModel(), minutes: str = "1,10,60,480"
) -> None:
    """Print which model to train on a text in the time one has, and the bits per byte to expect.

    Times some steps on this machine, reads the text, and trains nothing. `gpt fit --minutes M` takes the same
    options and trains the plan.

    Args:
        data: the text; other options are planned around.
        model: options of the model to plan around.
        minutes: the times to plan for, from the start of `gpt fit` to its end.
    """
    times = sorted({number("minutes", part) for part in minutes.split(",")})
    given = {f"model.config.{name}": value for name, value in asdict(model.config).items()}
    given |= {f"data.{name}": value for name, value in asdict(data).items()}
    print("\n".join(table(times, planner(given))))


def planner(given: Mapping[str, Any]) -> Callable[[float], Plan]:
    """Read the text and time this machine once: what plans for some minutes around these options."""
    given = {name: value for name, value in given.items() if value is not None}
    limits = {"data.val_fraction": (0, 0.99)}
    numbers = {name: number(name, given[name], *limits.get(name, (1,))) for name in GIVEN if name in given}
    vocab_size = int(numbers.get("model.config.vocab_size", 0)) or None
    corpus = given.get("data.corpus", GivenData.corpus)
    reading = {name: given.get(f"data.{name}") for name in _READING}
    val_fraction = numbers.get("data.val_fraction")
    text = measure(corpus, given.get("data.vocabulary"), vocab_size, val_fraction, **reading)
    keep_freed_memory()
    accelerator = given.get("trainer.accelerator", "auto")
    device = torch.device("cuda" if torch.cuda.is_available() and accelerator != "cpu" else "cpu")
    precision = str(given.get("trainer.precision", default_precision(accelerator)))
    cost, law = probe(device, precision), Law.load()
    start = time.perf_counter() - STARTED + _REST_OF_START
    return lambda minutes: choose(text, cost, law, minutes, numbers, start)


def number(name: str, value: Any, least: float = 0, most: float = 1_000_000) -> float:
    """The value of an option; an InputError if it is no number from `least` to `most`."""
    try:
        if least <= float(value) <= most:
            return float(value)
    except (TypeError, ValueError):
        pass
    raise InputError(f"--{name} {value}: expected a number from {least:,} to {most:,}")


def table(times: list[float], plan_for: Callable[[float], Plan]) -> Iterator[str]:
    """Lines of a table of the plans for some minutes, and of what limits them."""
    names = ["minutes", "width x layers", "parameters", "vocabulary", "context", "batch", "steps", "tokens"]
    names += ["passes", "bits/byte", "limit"]
    yield "  ".join(names)
    enough, extrapolates = [], False
    for minutes in times:
        try:
            plan = plan_for(minutes)
        except InputError as error:  # too little time
            if minutes == times[-1]:
                raise
            yield str(error)
            continue
        shape, extrapolates = plan.shape, extrapolates or plan.extrapolates
        limit = "time" if is_worth(plan_for(2 * minutes), plan) else "text"
        cells = [
            *(f"{minutes:g}", f"{shape.emb_dim} x {shape.num_layers}", _short(shape.blocks + shape.table)),
            *(f"{shape.vocab_size}", f"{shape.context_length}", f"{shape.batch_size}", f"{plan.steps}"),
            *(_short(plan.tokens), f"{plan.passes:.3g}"),
            *(f"{plan.bits_per_byte:.3f}{'*' * plan.extrapolates}", limit),
        ]
        yield "  ".join(cell.rjust(len(name)) for cell, name in zip(cells, names, strict=True))
        enough += [minutes] if limit == "text" else []
    if enough:
        yield f"more minutes than {enough[0]:g} gain nothing here: give more text"
    if extrapolates:
        yield "* extrapolated: the law was not measured so far, see docs/scaling.md"


def _short(number: float) -> str:
    """A number in thousands, millions or billions."""
    power = min(3, max(0, int(math.log10(max(number, 1)) // 3)))
    return f"{number / 1000**power:.3g}{' kMG'[power].strip()}"
