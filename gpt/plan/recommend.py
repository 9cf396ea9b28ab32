"""`gpt plan`: what a text needs and what it can give, in a table by the time one has; nothing is trained."""

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from jsonargparse import ArgumentParser

from gpt import STARTED
from gpt.data.corpus import find_corpus
from gpt.data.shards import META
from gpt.data.split import LEARNED_BYTES
from gpt.errors import InputError
from gpt.pictures.figures import save
from gpt.pictures.runs import short
from gpt.plain import seconds_of
from gpt.plan.cost import Cost, Shape, probe
from gpt.plan.law import Law
from gpt.plan.plan import GIVEN, Plan, choose
from gpt.plan.text import Text, measure
from gpt.training.device import default_precision, keep_freed_memory

PLANNED_AROUND = (
    *("data.corpus", *GIVEN, "data.vocabulary", "data.text_column", "data.most_bytes"),
    *("trainer.accelerator", "trainer.precision"),
)
"""Options of `gpt fit` that a plan keeps."""

_REST_OF_START = 3.0  # seconds from the plan to the first step, without tokenizing
_SMALL = Shape(2048, 64, 128, 2, 24)
_BYTES_PER_TOKEN = 4
_LEAST_READ = 1 << 22
_READ = 8e6  # bytes in a minute by each core: more would be tokenized for longer than is trained on it
_LEAST_SECONDS = 15.0  # to start, to time some steps, to try out the text, and to end, on two cores
_LEARNING = 1e-6  # seconds to learn a vocabulary, for each byte that it is learned from


def plan(arguments: list[str]) -> None:
    """Print which model to train on a text in the time one has, and the bits per byte to expect.

    Times some steps on this machine, reads the text, and trains nothing. `gpt fit --minutes M` takes the same
    options and trains the plan.
    """
    parser = ArgumentParser("gpt plan", description=plan.__doc__, exit_on_error=False, allow_abbrev=False)
    parser.epilog = "example: gpt plan --data.corpus my.txt"
    what = "the times to plan for, from the start of gpt fit to its end"
    parser.add_argument("--minutes", default="1,10,60,480", help=what)
    parser.add_argument("--picture", help="a .png or .svg of the bits per byte to expect in these times")
    for name in PLANNED_AROUND:
        kind = float if name == "data.val_fraction" else int if name in (*GIVEN, "data.most_bytes") else str
        parser.add_argument(f"--{name}", type=kind, help="as in gpt fit: the rest is planned around it")
    parser.set_defaults({"data.corpus": "python-docs"})
    words = arguments[1:]
    if words and not words[0].startswith("-"):  # a text before the options
        words = ["--data.corpus", *words]
    given = vars(parser.parse_args(words).as_flat())
    times = sorted({seconds_of("minutes", part) / 60 for part in given["minutes"].split(",")})
    picture, plans = given.pop("picture"), list[Plan]()
    for line in table(times, planner(given), plans):
        print(line, flush=True)
    if picture:
        draw(plans, picture)


def planner(given: Mapping[str, Any]) -> Callable[[float], Plan]:
    """Time this machine once: what reads the text and plans for some minutes around these options."""
    given = {name: value for name, value in given.items() if value is not None}
    limits = {"data.val_fraction": (0, 0.99)}
    numbers = {name: number(name, given[name], *limits.get(name, (1,))) for name in GIVEN if name in given}
    reading = {name: given.get(f"data.{name}") for name in ("vocabulary", "text_column")}
    reading["vocab_size"] = int(numbers.get("model.config.vocab_size", 0)) or None
    reading["val_fraction"] = numbers.get("data.val_fraction")
    corpus = given.get("data.corpus", "python-docs")
    is_prepared = (Path(corpus) / META).is_file()
    size = None if is_prepared else find_corpus(corpus, text_column=reading["text_column"]).size()
    accelerator = given.get("trainer.accelerator", "auto")
    law = Law.load()

    @cache
    def timed() -> tuple[Cost, float]:
        keep_freed_memory()
        device = torch.device("cuda" if torch.cuda.is_available() and accelerator != "cpu" else "cpu")
        cost = probe(device, str(given.get("trainer.precision", default_precision(accelerator))))
        return cost, time.perf_counter() - STARTED + _REST_OF_START

    @cache
    def measured(most_bytes: int | None) -> tuple[Text, float]:
        began = time.perf_counter()
        text = measure(corpus, **reading, most_bytes=most_bytes)
        return text, time.perf_counter() - began

    def plan_for(minutes: float) -> Plan:
        learned = min(size or 0, LEARNED_BYTES) * _LEARNING
        if 60 * minutes < (least := _LEAST_SECONDS + learned):  # said before anything is measured
            enough = math.ceil(least / 6) / 10
            raise InputError(f"{minutes:g} minutes do not suffice to start: give at least {enough:g}")
        cost, start = timed()
        most = int(given.get("data.most_bytes") or most_bytes(cost, minutes))
        text, seconds = measured(None if size is not None and size <= most else most)
        return choose(text, cost, law, minutes, numbers, start + seconds)

    return plan_for


def draw(plans: Sequence[Plan], picture: str) -> None:
    """Bits per byte over minutes, with the standard errors of the predictions."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    minutes, bits = ([getattr(plan, name) for plan in plans] for name in ("minutes", "bits_per_byte"))
    axes.errorbar(minutes, bits, [plan.error for plan in plans], marker="o", capsize=4)
    axes.set(xscale="log", xlabel="minutes", ylabel="bits per byte of held-out text")
    axes.set_xticks(minutes, [f"{time:g}" for time in minutes])
    axes.grid(alpha=0.25)
    save(figure, picture)


def most_bytes(cost: Cost, minutes: float) -> int:
    """The text that a small model reads in some minutes: a power of two, so that it is the same again."""
    seconds = float(cost.step(_SMALL)) / _SMALL.tokens / _BYTES_PER_TOKEN
    most = min(60 * minutes / seconds, minutes * (os.cpu_count() or 1) * _READ)
    return 1 << round(math.log2(max(_LEAST_READ, most)))


def number(name: str, value: Any, least: float = 0, most: float = 1_000_000) -> float:
    """The value of an option; an InputError if it is no number from `least` to `most`."""
    with suppress(TypeError, ValueError):
        if least <= float(value) <= most:
            return float(value)
    raise InputError(f"--{name} {value}: expected a number from {least:,} to {most:,}")


def table(times: list[float], plan_for: Callable[[float], Plan], plans: list[Plan]) -> Iterator[str]:
    """Lines of a table of the plans for some minutes, which are appended to `plans`."""
    names = ["minutes", "width x layers", "parameters", "vocabulary", "context", "batch", "steps", "tokens"]
    names += ["passes", "  bits/byte  "]
    yield "  ".join(names)
    extrapolates = False
    for minutes in times:
        try:
            plan = plan_for(minutes)
        except InputError as error:  # too little time
            if minutes == times[-1]:
                raise
            yield str(error)
            continue
        plans.append(plan)
        shape, extrapolates = plan.shape, extrapolates or plan.extrapolates
        cells = (
            *(f"{minutes:g}", f"{shape.emb_dim} x {shape.num_layers}", short(shape.blocks + shape.table)),
            *(f"{shape.vocab_size}", f"{shape.context_length}", f"{shape.batch_size}", f"{plan.steps}"),
            *(short(plan.tokens), f"{plan.passes:.3g}"),
            f"{plan.bits_per_byte:.3f} ± {plan.error:.2f}{'*' if plan.extrapolates else ''}",
        )
        yield "  ".join(cell.rjust(len(name)) for cell, name in zip(cells, names, strict=True))
    if extrapolates:
        yield "* extrapolated: the law was not measured so far, see docs/planning.md"
