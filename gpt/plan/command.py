"""`gpt plan`, and what a plan is made from: the speed of the machine and the size of the text."""

import json
import math
import os
import time
import timeit
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from jsonargparse import ArgumentParser

from gpt.config import GPTConfig
from gpt.cores import cores
from gpt.data.corpus import Corpus, find_corpus
from gpt.data.shards import Prepared, is_prepared
from gpt.data.split import LEARNED_BYTES, SPLITS, Divided
from gpt.errors import InputError
from gpt.evaluation.evaluate import score_sample
from gpt.files import cache_folder, write_json
from gpt.model import GPT
from gpt.pictures.runs import short
from gpt.plain import seconds_of, with_first
from gpt.plan.rule import END_SECONDS, GIVEN, SHARES, Machine, Plan, Shape, Text, choose, trained_on
from gpt.text.tokenizer import Tokenizer
from gpt.text.vocabulary import find_vocabulary
from gpt.training.device import default_precision, device_name, free_memory, keep_freed_memory
from gpt.training.loss import linear_cross_entropy
from gpt.training.optimizers import OptimizerConfig, build_optimizer
from gpt.training.processes import of_first_process
from gpt.training.sampled import sampled_cross_entropy
from gpt.weights.load import cached, choose_device

TUNED_CONTEXT = 256
"""Positions that are tuned, if the weights have so many and no other number is given."""
BYTES_PER_TOKEN = 4
"""About so many, where they are not counted."""
SPEEDS = "speed.json"
"""In the cache: operations of training a second, by `speed_key`."""

_TIMED = 1.0  # seconds
_TIMED_SHAPE = Shape(vocab_size=4096, context_length=64, emb_dim=128, num_layers=2, batch_size=48)
_TIMED_ON_GPU = Shape(vocab_size=16_384, context_length=256, emb_dim=512, num_layers=8, batch_size=64)
_TRAINER = 1.1  # a step of a run, with callbacks and batches, over a bare one
_BUSY = 0.8  # of its cores' time that a process gets: on an idle machine all of it
_LEAST_READ = 1 << 22  # bytes: on a busy machine a short text is still read whole
_READ = 8e6  # bytes in a minute by each core: more would be tokenized for longer than is trained on it
# Seconds of a core to learn a vocabulary from a byte, and to divide, tokenize and write one.
_LEARNING = 1e-6
_TOKENIZING = 3e-7
_REST_OF_START = 1.5  # seconds from the plan to the first step, beside these
_LEAST_SECONDS = 10.0  # to start, to train a little, and to end
_LEAST_HELD_OUT = 100  # bytes, which the result of a run is decided by
_SAMPLE = 1 << 20  # characters to pack
_SAMPLE_PART = 1 << 15  # of one piece of the text, at least: zlib looks so far back
_USUAL = "gpt2"  # weights, if they are at hand and none are named
_PLANNED_AROUND = (  # options of `gpt fit` that a plan keeps
    "data.corpus",
    *GIVEN,
    "data.vocabulary",
    "data.text_column",
    "data.skip_bad_rows",
    "data.most_bytes",
    "trainer.accelerator",
    "trainer.precision",
)
_HEADINGS = (
    "minutes",
    "width x layers",
    "parameters",
    "vocabulary",
    "context",
    "batch",
    "tokens",
    "epochs",
    " memory",
    "    reads",
)


def plan(arguments: list[str]) -> None:
    """Print which model to train on a text in the time one has: what `gpt fit --minutes M` would train.

    Times some steps on this machine and takes the size of the text; what the run will reach is not predicted.
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
        whole = (*GIVEN, "data.most_bytes", "data.skip_bad_rows")
        kind = float if name in SHARES else int if name in whole else str
        parser.add_argument(f"--{name}", type=kind, help="as in gpt fit: the rest is planned around it")
    parser.set_defaults({"data.corpus": "python-docs"})
    given = vars(parser.parse_args(with_first(arguments[1:], "data.corpus")).as_flat())
    times = sorted({seconds_of("minutes", part) / 60 for part in given["minutes"].split(",")})
    plans: list[Plan] = []
    for line in table(times, planner(given, start_seconds=_LEAST_SECONDS / 2), plans):
        print(line, flush=True)
    named = given["model.init_from"]
    if named or cached(_USUAL):
        try:
            print(beside(named or _USUAL, given, plans[-1].text.most_bytes), flush=True)
        except InputError:  # a prepared folder has the vocabulary of other weights
            if named:
                raise


def planner(
    given: Mapping[str, Any], began: float | None = None, start_seconds: float = 0.0
) -> Callable[[float], Plan]:
    """What plans for some minutes around these options.

    Of the minutes go the seconds since the process `began`, a time of `time.perf_counter`, or without one
    `start_seconds`.
    """
    given = {name: value for name, value in given.items() if value is not None}
    numbers = {name: given[name] for name in GIVEN if name in given}
    for name, value in numbers.items():
        least, most = (0, 0.99) if name in SHARES else (1, 1_000_000)
        if not least <= value <= most:
            raise InputError(f"--{name} {value}: expected a number from {least:,} to {most:,}")
    corpus = given.get("data.corpus", "python-docs")
    size = None if is_prepared(corpus) else _find(corpus, given).size()
    machines: list[Machine] = []

    def plan_for(minutes: float) -> Plan:
        around = _LEARNING * min(size or 0, LEARNED_BYTES) / cores() + END_SECONDS
        _check_time(minutes, _LEAST_SECONDS + around)  # before anything is measured
        if not machines:
            machines.append(time_machine(given))
        (machine,) = machines
        text = measure(corpus, given, given.get("data.most_bytes") or bytes_to_read(machine, minutes))
        if not text.tokens:
            around += (_TOKENIZING * text.size) / cores()
        gone = of_first_process(
            "start", lambda: start_seconds if began is None else time.perf_counter() - began
        )
        seconds = 60 * minutes - gone - _REST_OF_START - around
        _check_time(minutes, 60 * minutes - seconds + 1)
        return choose(text, machine, seconds, numbers)

    return plan_for


def bytes_to_read(
    machine: Machine, minutes: float, least: int = _LEAST_READ, shape: Shape | None = None
) -> int:
    """Of a longer text: what a model can be trained on once in some minutes, by default the rule's.

    A power of two, so that the same is read again.
    """
    in_time = trained_on(machine, 60 * minutes, shape) * BYTES_PER_TOKEN
    return 1 << round(math.log2(max(least, min(in_time, minutes * cores() * _READ))))


def measure(corpus: str, given: Mapping[str, Any], most: int) -> Text:
    """What the rule has to know of a text; an InputError if too little of it is held out."""
    if is_prepared(corpus):
        prepared = Prepared(corpus)
        train, val = (prepared.counts[split] for split in SPLITS)
        text = Text(
            size=train.bytes + val.bytes,
            val_fraction=val.bytes / max(1, train.bytes + val.bytes),
            vocab_size=prepared.tokenizer.n_vocab,
            tokens=train.tokens + val.tokens,
            packed=_packed(
                [prepared.tokenizer.decode(prepared.spread_ids(_SAMPLE // BYTES_PER_TOKEN, "train"))]
            ),
        )
    else:
        source = _find(corpus, given)
        divided = Divided(source, given.get("data.val_fraction"), most)
        text = Text(
            size=divided.size,
            val_fraction=divided.rule.share,
            most_bytes=divided.drawn,
            vocab_size=_size_of_vocabulary(given),
            packed=_packed(piece.text for piece in divided.sample()),
        )
    if text.val_fraction * text.size < _LEAST_HELD_OUT:
        raise InputError(
            f"{corpus} has fewer than {_LEAST_HELD_OUT} bytes of held-out text, which decides how long a run "
            "goes on: give more, prepare it with a larger --val_fraction, or leave --data.val_fraction out"
        )
    return text


def _find(corpus: str, given: Mapping[str, Any]) -> Corpus:
    """The corpus, as these options read it."""
    names = ("text_column", "skip_bad_rows")
    return find_corpus(corpus, **{name: given.get(f"data.{name}") for name in names})


def _packed(texts: Iterable[str]) -> float:
    """The share of its size to which zlib packs the beginnings of these texts, about `_SAMPLE` characters."""
    parts: list[str] = []
    missing = _SAMPLE
    for text in texts:
        parts.append(text[: max(_SAMPLE_PART, missing // 8)])
        missing -= len(parts[-1])
        if missing <= 0:
            break
    sample = "".join(parts).encode()
    return len(zlib.compress(sample)) / max(1, len(sample))


def _size_of_vocabulary(given: Mapping[str, Any]) -> int | None:
    """None where the plan chooses it."""
    name = given.get("data.vocabulary", "learn")
    size = given.get("model.config.vocab_size")
    if name == "learn" and size is None:
        return None
    return find_vocabulary(name, size or Tokenizer().n_vocab).n_vocab


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
            short(plan.parameters),
            f"{shape.vocab_size}",
            f"{shape.context_length}",
            f"{shape.batch_size}",
            short(plan.tokens),
            f"{plan.epochs:.3g}{'' if plan.is_whole else '+'}",
            f"{shape.memory() / 1e9:.2g} GB",
            f"{plan.text.size / 1e6:.3g} MB",
        )
        yield "  ".join(cell.rjust(len(name)) for cell, name in zip(cells, _HEADINGS, strict=True))
    if not all(plan.is_whole for plan in plans):
        yield "+ and longer, while held-out text gains"


def beside(weights: str, given: Mapping[str, Any], most: int | None) -> str:
    """A line on weights that could be tuned instead: what they reach as they are."""
    bits, error = score_sample(
        weights,
        given["data.corpus"],
        given["model.config.context_length"] or TUNED_CONTEXT,
        given["trainer.accelerator"] or "auto",
        val_fraction=given["data.val_fraction"],
        text_column=given["data.text_column"],
        skip_bad_rows=given.get("data.skip_bad_rows"),
        most_bytes=most,
    )
    return (
        f"{weights} as it is: {bits:.3f} ± {error:.2f} bits per byte of held-out text; where a run from "
        f"scratch stays above that, tune it instead: --model.init_from {weights}"
    )


def time_machine(given: Mapping[str, Any]) -> Machine:
    """The machine where a run with these options computes, as the first of several processes measures it.

    Its speed is that of before, in the cache, if this machine, version and number of threads have one.
    """
    keep_freed_memory()
    accelerator: Any = given.get("trainer.accelerator") or "auto"
    device = choose_device(accelerator)
    precision = given.get("trainer.precision") or default_precision(accelerator)
    processes = int(os.environ.get("WORLD_SIZE", "1"))  # that torchrun has started
    return Machine(
        speed=processes * of_first_process("speed", lambda: _speed(device, precision)),
        memory=of_first_process("memory", lambda: free_memory(device)),
        is_gpu=device.type == "cuda",
        processes=processes,
    )


def speed_key(device: torch.device, precision: str) -> str:
    """Whose speed it is in the cache: of this machine and version, with so many threads."""
    threads = f"{cores()} cores, {torch.get_num_threads()} threads"
    versions = f"gpt {version('minimal-gpt')}, torch {torch.__version__}"
    return f"{device_name(device)}, {threads}, {precision}, {versions}"


def _speed(device: torch.device, precision: str) -> float:
    """Operations of training a second: those of the cache, or measured in about a second."""
    path = cache_folder() / "speed.json"
    versions = f"gpt {version('minimal-gpt')}, torch {torch.__version__}"
    key = (
        f"{device_name(device)}, {cores()} cores, {torch.get_num_threads()} threads, {precision}, {versions}"
    )
    known = _read_speeds(path)
    if key not in known:
        speed, is_idle = _timed(device, precision)
        if not is_idle:  # it is not kept, and the clock corrects the run when the others end
            return speed
        known[key] = speed
        with suppress(OSError):  # a cache that cannot be written
            write_json(path, known)
    return known[key]


def _read_speeds(path: Path) -> dict[str, float]:
    """Those of the cache; none of a file that is no such thing."""
    with suppress(OSError, ValueError):
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return {key: float(speed) for key, speed in found.items() if speed > 0}
    return {}


def _timed(device: torch.device, precision: str) -> tuple[float, bool]:
    """Operations a second of a training of one shape, and whether no other program took the cores."""
    shape = _TIMED_ON_GPU if device.type == "cuda" else _TIMED_SHAPE
    machine = Machine(speed=1.0, memory=0.0, is_gpu=device.type == "cuda")
    step = _step(shape, machine.sampled_softmax, device, precision)
    step()  # the first is slow
    began = time.perf_counter()
    computed = time.process_time()
    seconds = [timeit.timeit(step, number=1)]
    while len(seconds) < 2 or time.perf_counter() - began < _TIMED:
        seconds.append(timeit.timeit(step, number=1))
    # Threads compute, or wait for each other without rest: less than all of the time went to other programs.
    got = (time.process_time() - computed) / (time.perf_counter() - began) / torch.get_num_threads()
    median = sorted(seconds)[len(seconds) // 2]
    speed = shape.operations(machine.sampled_softmax) / (_TRAINER * median)
    return speed, device.type != "cpu" or got >= _BUSY


def _step(shape: Shape, sampled_softmax: int, device: torch.device, precision: str) -> Callable[[], None]:
    """A training step, without the Trainer."""
    config = GPTConfig(
        vocab_size=shape.vocab_size,
        context_length=shape.context_length,
        emb_dim=shape.emb_dim,
        num_heads=shape.emb_dim // 32,
        num_layers=shape.num_layers,
        exact_gelu=True,
    )
    with device:
        model = GPT(config)
    optimizer = build_optimizer(model, OptimizerConfig(), precision)
    x = torch.randint(shape.vocab_size, (shape.batch_size, shape.context_length), device=device)
    dtype = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(precision)

    def step() -> None:
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            rows = model.features(x).flatten(0, 1), model.head.weight, x.flatten()
            if sampled_softmax > 1:
                loss = sampled_cross_entropy(*rows, sampled_softmax)
            else:
                loss = linear_cross_entropy(*rows)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        torch.get_device_module(device).synchronize()

    return step


def _check_time(minutes: float, seconds: float) -> None:
    """InputError for fewer minutes than the seconds that are needed."""
    if 60 * minutes < seconds:
        raise InputError(
            f"{minutes:g} minutes do not suffice to start: give at least {1.1 * seconds / 60:.2f}"
        )
