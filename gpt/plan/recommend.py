"""`gpt plan`: what a text needs and what it can give, in a table by the time one has."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

from jsonargparse import ArgumentParser

from gpt import STARTED
from gpt.data.corpus import find_corpus
from gpt.data.shards import is_prepared
from gpt.data.split import LEARNED_BYTES
from gpt.errors import InputError
from gpt.evaluation.evaluate import score_sample
from gpt.pictures.runs import short
from gpt.plain import seconds_of, with_first
from gpt.plan.cost import Cost, Shape, probe
from gpt.plan.law import Law
from gpt.plan.plan import GIVEN, SHARES, Plan, check_time, choose
from gpt.plan.text import Text, measure
from gpt.threads import cores
from gpt.training.device import default_precision, keep_freed_memory
from gpt.weights.load import cached, choose_device

TUNED_CONTEXT = 256
"""Positions that are tuned, if the weights have so many and no other number is given."""
BYTES_PER_TOKEN = 4
"""About so many, where they are not counted."""

_PLANNED_AROUND = (  # options of `gpt fit` that a plan keeps
    "data.corpus",
    *GIVEN,
    "data.vocabulary",
    "data.text_column",
    "data.most_bytes",
    "trainer.accelerator",
    "trainer.precision",
)
_REST_OF_START = 0.3  # seconds from the plan to the first step, without tokenizing
_SMALL = Shape(2048, 64, 128, 2, 24)
_LEAST_READ = 1 << 22  # on a busy machine a short text is still read whole
_READ = 8e6  # bytes in a minute by each core: more would be tokenized for longer than is trained on it
_LEAST_SECONDS = 15.0  # to start, to time some steps, to try out the text, and to end, on two cores
_USUAL = "gpt2"  # weights, if they are at hand and none are named
_LEARNING = 1e-6  # seconds to learn a vocabulary, for each byte that it is learned from

_HEADINGS = (
    "minutes",
    "width x layers",
    "parameters",
    "vocabulary",
    "context",
    "batch",
    "steps",
    "passes",
    "  bits/byte  ",
)


def plan(arguments: list[str]) -> None:
    """Print which model to train on a text in the time one has, and the bits per byte to expect.

    Times some steps on this machine, reads the text, and tries out how hard it is. `gpt fit --minutes M`
    takes the same options and trains the plan.
    """
    parser = ArgumentParser(
        "gpt plan",
        description=plan.__doc__,
        epilog="example: gpt plan --data.corpus my.txt",
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--minutes",
        default="1,10,60,480",
        help="the times to plan for, from the start of gpt fit to its end",
    )
    parser.add_argument(
        "--model.init_from",
        help=f"weights to tune instead, as in gpt fit; {_USUAL} if it was downloaded before",
    )
    for name in _PLANNED_AROUND:
        kind = float if name in SHARES else int if name in (*GIVEN, "data.most_bytes") else str
        parser.add_argument(f"--{name}", type=kind, help="as in gpt fit: the rest is planned around it")
    parser.set_defaults({"data.corpus": "python-docs"})
    given = vars(parser.parse_args(with_first(arguments[1:], "data.corpus")).as_flat())
    times = sorted({seconds_of("minutes", part) / 60 for part in given["minutes"].split(",")})
    plans: list[Plan] = []
    for line in table(times, planner(given), plans):
        print(line, flush=True)
    named = given["model.init_from"]
    if named or cached(_USUAL):
        try:
            for line in beside(named or _USUAL, given, plans):
                print(line, flush=True)
        except InputError:  # a prepared folder has the vocabulary of other weights
            if named:
                raise


def planner(given: Mapping[str, Any]) -> Callable[[float], Plan]:
    """Time this machine once: what reads the text and plans for some minutes around these options."""
    given = {name: value for name, value in given.items() if value is not None}
    numbers = {name: given[name] for name in GIVEN if name in given}
    for name, value in numbers.items():
        least, most = (0, 0.99) if name in SHARES else (1, 1_000_000)
        if not least <= value <= most:
            raise InputError(f"--{name} {value}: expected a number from {least:,} to {most:,}")
    names = ("data.vocabulary", "model.config.vocab_size", "data.val_fraction", "data.text_column")
    reading = {name.rpartition(".")[2]: given.get(name) for name in names}
    corpus = given.get("data.corpus", "python-docs")
    size = None if is_prepared(corpus) else find_corpus(corpus, text_column=reading["text_column"]).size()
    law = Law.load()

    @cache
    def timed() -> tuple[Cost, float]:
        # The clock is read after the machine was timed.
        return time_machine(given), time.perf_counter() - STARTED + _REST_OF_START

    @cache
    def measured(most_bytes: int | None, steps: int) -> tuple[Text, float]:
        began = time.perf_counter()
        text = measure(corpus, **reading, most_bytes=most_bytes, steps=steps)
        return text, time.perf_counter() - began

    def plan_for(minutes: float) -> Plan:
        # Before anything is measured.
        check_time(minutes, _LEAST_SECONDS + _LEARNING * min(size or 0, LEARNED_BYTES))
        cost, start = timed()
        most = given.get("data.most_bytes") or most_bytes(cost, minutes)
        whole = size is not None and size <= most
        text, seconds = measured(None if whole else most, trial_steps(minutes))
        return choose(text, cost, law, minutes, numbers, start + seconds)

    return plan_for


def time_machine(given: Mapping[str, Any]) -> Cost:
    """What steps cost where a run with these options computes."""
    keep_freed_memory()
    accelerator = given.get("trainer.accelerator", "auto")
    return probe(choose_device(accelerator), given.get("trainer.precision") or default_precision(accelerator))


def trial_steps(minutes: float) -> int:
    """Of a text's trial, for a plan of some minutes: ten seconds of five."""
    return 300 if minutes >= 5 else 100


def most_bytes(cost: Cost, minutes: float, shape: Shape = _SMALL, least: int = _LEAST_READ) -> int:
    """The text that a model reads in some minutes: a power of two, so that it is the same again."""
    seconds = cost.step(shape) / shape.tokens / BYTES_PER_TOKEN
    most = min(60 * minutes / seconds, minutes * cores() * _READ)
    return 1 << round(math.log2(max(least, most)))


def beside(weights: str, given: Mapping[str, Any], plans: list[Plan]) -> Iterator[str]:
    """Lines on weights beside the plans: they are scored as they are, and tuning makes them better."""
    bits, error = score_sample(
        weights,
        given["data.corpus"],
        given["model.config.context_length"] or TUNED_CONTEXT,
        val_fraction=given["data.val_fraction"],
        text_column=given["data.text_column"],
        most_bytes=plans[-1].text.most_bytes,
    )
    yield f"{weights} as it is: {bits:.3f} ± {error:.2f} bits per byte"
    times = ", ".join(f"{plan.minutes:g}" for plan in plans)
    yield f"{weights} tuned for {times} minutes: less than {bits:.3f}; how much less is not predicted"
    lower = [plan.minutes for plan in plans if plan.bits_per_byte + plan.error < bits]
    scratch = f"with {lower[0]:g} minutes or more train from scratch, with less " if lower else ""
    yield f"{scratch}tune {weights}: --model.init_from {weights}"


def table(times: list[float], plan_for: Callable[[float], Plan], plans: list[Plan]) -> Iterator[str]:
    """Lines of a table of the plans for some minutes, which are appended to `plans`."""
    yield "  ".join(_HEADINGS)
    for minutes in times:
        try:
            plan = plan_for(minutes)
        except InputError as error:  # too little time
            if minutes == times[-1]:
                raise
            yield str(error)
            continue
        plans.append(plan)
        shape = plan.shape
        cells = (
            f"{minutes:g}",
            f"{shape.emb_dim} x {shape.num_layers}",
            short(shape.blocks + shape.table),
            f"{shape.vocab_size}",
            f"{shape.context_length}",
            f"{shape.batch_size}",
            f"{plan.steps}",
            f"{plan.passes:.3g}",
            f"{plan.bits_per_byte:.3f} ± {plan.error:.2f}{'*' if plan.extrapolates else ''}",
        )
        yield "  ".join(cell.rjust(len(name)) for cell, name in zip(cells, _HEADINGS, strict=True))
    if any(plan.extrapolates for plan in plans):
        yield "* extrapolated: the law was not measured so far, see docs/planning.md"
