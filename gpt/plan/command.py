"""`gpt plan`, and the measurements that a plan is based on: the machine's speed and the text's size."""

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
"""Default context length of a tuning, or the weights' own where that is shorter."""
BYTES_PER_TOKEN = 4
"""Bytes of text per token, an estimate where tokens are not counted."""
SPEEDS = "speed.json"
"""File in the cache with measured training speeds, in operations per second, by `speed_key`."""

_TIMED = 1.0  # seconds that the measurement takes at least
_TIMED_SHAPE = Shape(vocab_size=4096, context_length=64, emb_dim=128, num_layers=2, batch_size=48)
_TIMED_ON_GPU = Shape(vocab_size=16_384, context_length=256, emb_dim=512, num_layers=8, batch_size=64)
_TRAINER = 1.1  # time of a step of a run, with callbacks and data loading, over a bare step
_BUSY = 0.8  # share of its cores' time that a process gets on an idle machine, at least
_LEAST_READ = 1 << 22  # bytes: a short text is read whole even on a busy machine
_READ = 8e6  # bytes per minute and core: tokenizing more would take longer than training on it
# Core seconds per byte: to learn a vocabulary; to divide, tokenize and write the text.
_LEARNING = 1e-6
_TOKENIZING = 3e-7
_REST_OF_START = 1.5  # seconds from the plan to the first step, besides the above
_LEAST_SECONDS = 10.0  # enough to start, train a little, and end
_LEAST_HELD_OUT = 100  # bytes: fewer cannot decide how long to train
_SAMPLE = 1 << 20  # characters to compress
_SAMPLE_PART = 1 << 15  # characters of each piece at least: zlib's window is this long
_USUAL = "gpt2"  # weights to score if none are named and these are in the cache
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
    """Print which model to train on a text in a given time: the plan of `gpt fit --minutes M`.

    It times some steps on this machine and measures the size of the text. It does not predict the loss.
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
        except InputError:  # the prepared folder has another vocabulary
            if named:
                raise


def planner(
    given: Mapping[str, Any], began: float | None = None, start_seconds: float = 0.0
) -> Callable[[float], Plan]:
    """Return a function from minutes to a plan that keeps the given options.

    The minutes include the time since the process `began`, by `time.perf_counter`; without `began`, they
    include `start_seconds`.
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
        _check_time(minutes, _LEAST_SECONDS + around)  # fail before anything is measured
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
    """Return how many bytes to read of a long text: as many as a model can train on once in the time.

    `shape` is the model's, by default the one that the rule chooses. The result is a power of two, so that
    runs with slightly different speeds read the same text.
    """
    in_time = trained_on(machine, 60 * minutes, shape) * BYTES_PER_TOKEN
    return 1 << round(math.log2(max(least, min(in_time, minutes * cores() * _READ))))


def measure(corpus: str, given: Mapping[str, Any], most: int) -> Text:
    """Measure a text for the rule; InputError if too little of it is held out."""
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
    """Find the corpus, as these options read it."""
    names = ("text_column", "skip_bad_rows")
    return find_corpus(corpus, **{name: given.get(f"data.{name}") for name in names})


def _packed(texts: Iterable[str]) -> float:
    """Return compressed over original size, by zlib, of these texts' beginnings: `_SAMPLE` characters."""
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
    """Return the vocabulary's size; None if the plan chooses it."""
    name = given.get("data.vocabulary", "learn")
    size = given.get("model.config.vocab_size")
    if name == "learn" and size is None:
        return None
    return find_vocabulary(name, size or Tokenizer().n_vocab).n_vocab


def table(times: list[float], plan_for: Callable[[float], Plan], plans: list[Plan]) -> Iterator[str]:
    """Yield the lines of a table with a plan for each of these minutes; append the plans to `plans`."""
    yield "  ".join(_HEADINGS)
    for minutes in times:
        try:
            plan = plan_for(minutes)
        except InputError as error:  # the time is too short
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
    """Return a line with the score of weights that could be tuned instead."""
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
    """Measure the machine for a run with these options; of several processes, the first one measures.

    Its speed comes from the cache, if one is stored for this machine, version and number of threads.
    """
    keep_freed_memory()
    accelerator: Any = given.get("trainer.accelerator") or "auto"
    device = choose_device(accelerator)
    precision = given.get("trainer.precision") or default_precision(accelerator)
    processes = int(os.environ.get("WORLD_SIZE", "1"))  # set by torchrun
    return Machine(
        speed=processes * of_first_process("speed", lambda: _speed(device, precision)),
        memory=of_first_process("memory", lambda: free_memory(device)),
        is_gpu=device.type == "cuda",
        processes=processes,
    )


def speed_key(device: torch.device, precision: str) -> str:
    """Return the key of a speed in the cache: machine, cores, threads, precision and versions."""
    threads = f"{cores()} cores, {torch.get_num_threads()} threads"
    versions = f"gpt {version('minimal-gpt')}, torch {torch.__version__}"
    return f"{device_name(device)}, {threads}, {precision}, {versions}"


def _speed(device: torch.device, precision: str) -> float:
    """Return the training speed in operations per second, from the cache or measured in about a second."""
    path = cache_folder() / SPEEDS
    key = speed_key(device, precision)
    known = _read_speeds(path)
    if key not in known:
        speed, is_idle = _timed(device, precision)
        if not is_idle:  # do not store it; the clock corrects the run when other programs end
            return speed
        known[key] = speed
        with suppress(OSError):  # the cache may be read-only
            write_json(path, known)
    return known[key]


def _read_speeds(path: Path) -> dict[str, float]:
    """Read the speeds in the cache; none if the file is missing or damaged."""
    with suppress(OSError, ValueError):
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return {key: float(speed) for key, speed in found.items() if speed > 0}
    return {}


def _timed(device: torch.device, precision: str) -> tuple[float, bool]:
    """Measure training operations per second on one shape, and whether the machine was idle."""
    shape = _TIMED_ON_GPU if device.type == "cuda" else _TIMED_SHAPE
    machine = Machine(speed=1.0, memory=0.0, is_gpu=device.type == "cuda")
    step = _step(shape, machine.sampled_softmax, device, precision)
    step()  # the first step is slow
    began = time.perf_counter()
    computed = time.process_time()
    seconds = [timeit.timeit(step, number=1)]
    while len(seconds) < 2 or time.perf_counter() - began < _TIMED:
        seconds.append(timeit.timeit(step, number=1))
    # Threads compute or spin, so they use all CPU time of their cores, except what other programs take.
    got = (time.process_time() - computed) / (time.perf_counter() - began) / torch.get_num_threads()
    median = sorted(seconds)[len(seconds) // 2]
    speed = shape.operations(machine.sampled_softmax) / (_TRAINER * median)
    return speed, device.type != "cpu" or got >= _BUSY


def _step(shape: Shape, sampled_softmax: int, device: torch.device, precision: str) -> Callable[[], None]:
    """Return a function that makes a training step, without the Trainer."""
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
    """Raise InputError if the minutes are shorter than the seconds that are needed."""
    if 60 * minutes < seconds:
        raise InputError(
            f"{minutes:g} minutes do not suffice to start: give at least {1.1 * seconds / 60:.2f}"
        )
