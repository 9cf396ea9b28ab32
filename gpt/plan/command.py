"""`gpt plan`, and the `Planner` that it shares with `gpt fit --minutes`."""

import time
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import replace

from jsonargparse import ArgumentError, ArgumentParser

from gpt.command_line import check_options, with_first
from gpt.cores import cores
from gpt.data.corpus import Corpus
from gpt.data.find import find_corpus
from gpt.data.options import DataOptions, Reading
from gpt.data.prepare import check_reading, open_prepared
from gpt.data.prepared import Prepared, is_prepared
from gpt.data.split import LEARNED_BYTES, SPLITS, Divided, divide_corpus
from gpt.errors import InputError
from gpt.evaluation.evaluate import score_sample
from gpt.help import HelpFormatter, value_name
from gpt.plain import Json, seconds_of
from gpt.plan.rule import BYTES_PER_TOKEN, END_SECONDS, Given, Plan, Text, bytes_to_read, choose, timed_shape
from gpt.progress import short
from gpt.text.tokenizer import Tokenizer
from gpt.text.vocabulary import check_size_used, find_vocabulary
from gpt.training.device import Precision
from gpt.training.processes import of_first_process, process_count
from gpt.training.speed import Machine, Shape, time_machine
from gpt.weights.load import Accelerator, cached

KEPT = {
    "model.config.emb_dim": int,
    "model.config.num_layers": int,
    "model.config.num_heads": int,
    "model.config.context_length": int,
    "model.config.vocab_size": int,
    "data.batch_size": int,
    "model.config.dropout": float,
}
"""Options that the rule keeps if they are given, with their types: the fields of `Given`."""
TUNED_CONTEXT = 256
"""Default context length of a tuning, or the weights' own where that is shorter."""

# Core seconds per byte: to learn a vocabulary; to divide, tokenize and write the text.
_LEARNING = 1e-6
_TOKENIZING = 3e-7
_USUAL_START = 5.0  # seconds from the start of `gpt fit` to its plan
_REST_OF_START = 1.5  # seconds from the plan to the first step, besides the above
_LEAST_SECONDS = 10.0  # enough to start, train a little, and end
_LEAST_TRAINING = 1.0  # seconds
_LEAST_HELD_OUT = 100  # bytes: fewer cannot decide how long to train
_SAMPLE = 1 << 20  # characters to compress
_SAMPLE_PART = 1 << 15  # characters of each piece at least: zlib's window is this long
_USUAL = "gpt2"  # weights to score if none are named and these are in the cache
_PLANNED_AROUND: dict[str, object] = {  # options of `gpt fit` that a plan keeps
    "data.corpus": str,
    **KEPT,
    "data.val_fraction": float,
    "data.vocabulary": str,
    "data.text_column": str,
    "data.skip_bad_rows": int,
    "data.most_bytes": int,
    "trainer.accelerator": Accelerator,
    "trainer.precision": Precision,
}
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
    "  reads",
)


def plan(arguments: list[str]) -> None:
    """Print which model to train on a text in a given time: the plan of `gpt fit --minutes M`.

    It times some steps on this machine and measures the size of the text. It does not predict the loss.
    """
    words = with_first(arguments[1:], "data.corpus")
    parser = _parser()
    try:
        options = vars(parser.parse_args(words).as_flat())
    except ArgumentError:
        check_options(parser, words, _PLANNED_AROUND)
        raise
    given = {name: value for name, value in options.items() if value is not None}
    times = sorted({seconds_of("minutes", part) / 60 for part in given["minutes"].split(",")})
    reading = Reading.of(given, "data.")
    check_reading(given["data.corpus"], reading)
    check_size_used(given.get("data.vocabulary"), given.get("model.config.vocab_size"))
    planner = Planner(given, reading)
    _print_plans(planner, times)
    named = given.get("model.init_from")
    if named or cached(_USUAL):
        try:
            print(_beside(named or _USUAL, planner, given), flush=True)
        except InputError:  # the prepared folder has another vocabulary
            if named:
                raise


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        "gpt plan",
        usage="gpt plan [TEXT] [--NAME VALUE]...",
        description=plan.__doc__,
        epilog="example: gpt plan my.txt --minutes 1,10",
        formatter_class=HelpFormatter,
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
    kept = parser.add_argument_group(
        "options of gpt fit",
        "The rest is planned around those that are given. gpt fit --help describes them.",
    )
    for name, kind in _PLANNED_AROUND.items():
        kept.add_argument(f"--{name}", type=kind, metavar=value_name(name, kind), help="")
    parser.set_defaults({"data.corpus": DataOptions.corpus})
    return parser


class Planner:
    """A planner of runs on one text. The text is found, and the machine timed, only once for all times.

    Args:
        given: options of `gpt fit` by name, such as `data.corpus` or those in `KEPT`. The plan keeps them.
        reading: how the corpus is read.
        began: when the process began, by `time.perf_counter`: the minutes count from there. None for a
            process that is still to come, which will need a usual time to get here.

    Raises:
        InputError: an option is out of its range, or there is no such corpus.
    """

    def __init__(self, given: Mapping[str, Json], reading: Reading, began: float | None = None) -> None:
        _check_ranges(given)
        kept = {name.rpartition(".")[2]: given[name] for name in KEPT if name in given}
        if "batch_size" in kept:  # the option counts the windows of a process, a plan those of all
            kept["batch_size"] *= process_count()
        self._given = Given(**kept)
        self._name = given.get("data.corpus", DataOptions.corpus)
        self._corpus: Corpus | Prepared
        if is_prepared(self._name):
            self._corpus = open_prepared(self._name, reading)
        else:
            self._corpus = find_corpus(self._name, reading)
        self._vocab_size = _given_vocabulary_size(given)
        self._device = given.get("trainer.accelerator"), given.get("trainer.precision")
        self._reading = reading
        self._began = began
        self._machines: dict[Shape, Machine] = {}
        """The machine as it was timed on each shape."""
        self._divided: Divided | None = None
        """The corpus in two parts, as the last plan reads it."""

    @property
    def text(self) -> Divided | Prepared:
        """The text of the last plan, to hand on to its run."""
        if isinstance(self._corpus, Prepared):
            return self._corpus
        assert self._divided, "there is no plan yet"
        return self._divided

    def plan(self, minutes: float) -> Plan:
        """Plan a run for these minutes, which are more in each further call.

        Raises InputError if they do not suffice, or too little text is held out.
        """
        size = None if isinstance(self._corpus, Prepared) else self._corpus.size()
        # Seconds before and after training and validation.
        around = _LEARNING * min(size or 0, LEARNED_BYTES) / cores() + END_SECONDS
        _check_time(minutes, _LEAST_SECONDS + around)  # fail before anything is measured
        shape = timed_shape(60 * minutes)
        if shape not in self._machines:
            self._machines[shape] = time_machine(*self._device, shape)
        machine = self._machines[shape]
        if isinstance(self._corpus, Prepared):
            text = measure_prepared(self._corpus)
        else:
            text = measure(self._divide(self._corpus, machine, minutes), self._vocab_size)
            around += _TOKENIZING * text.size / cores()
        _check_held_out(self._name, text)
        around += of_first_process("start", self._seconds_gone) + _REST_OF_START
        _check_time(minutes, around + _LEAST_TRAINING)
        return choose(text, machine, 60 * minutes - around, self._given)

    def _divide(self, corpus: Corpus, machine: Machine, minutes: float) -> Divided:
        """Divide as much of the corpus as is read in this time. A whole text is divided only once."""
        if self._divided and self._divided.limit is None:  # each time is longer than the one before
            return self._divided
        by_hand = self._reading.most_bytes
        divided = divide_corpus(
            corpus, self._reading.val_fraction, by_hand or bytes_to_read(machine, minutes)
        )
        if divided.limit is None and not by_hand:
            divided = replace(divided, most_bytes=None)
        self._divided = divided
        return divided

    def _seconds_gone(self) -> float:
        return _USUAL_START if self._began is None else time.perf_counter() - self._began


def _check_ranges(given: Mapping[str, Json]) -> None:
    """Raise InputError if a number that the plan keeps is out of its range."""
    for name in (*KEPT, "data.val_fraction"):
        if name not in given:
            continue
        least, most = (0, 0.99) if _PLANNED_AROUND[name] is float else (1, 1_000_000)
        if not least <= given[name] <= most:
            raise InputError(f"--{name} {given[name]}: expected a number from {least:,} to {most:,}")


def _check_time(minutes: float, seconds: float) -> None:
    """Raise InputError if the minutes are shorter than the seconds that are needed."""
    if 60 * minutes < seconds:
        raise InputError(
            f"{minutes:g} minutes do not suffice to start: give at least {1.1 * seconds / 60:.2f}"
        )


def measure(divided: Divided, vocab_size: int | None = None) -> Text:
    """Measure a text for the rule; `vocab_size` is that of a given vocabulary."""
    return Text(
        size=divided.size,
        val_fraction=divided.rule.share,
        most_bytes=divided.limit,
        vocab_size=vocab_size,
        zlib_ratio=_zlib_ratio(piece.text for piece in divided.sample()),
    )


def measure_prepared(prepared: Prepared) -> Text:
    """Measure a prepared text for the rule."""
    train, val = (prepared.counts[split] for split in SPLITS)
    ids = prepared.spread_ids(_SAMPLE // BYTES_PER_TOKEN, "train")
    # A text that is not prepared has no `<|endoftext|>` either.
    sample = prepared.tokenizer.decode(ids[ids != prepared.tokenizer.eot])
    return Text(
        size=train.bytes + val.bytes,
        val_fraction=val.bytes / max(1, train.bytes + val.bytes),
        vocab_size=prepared.tokenizer.n_vocab,
        tokens=train.tokens + val.tokens,
        zlib_ratio=_zlib_ratio([sample]),
    )


def _check_held_out(name: str, text: Text) -> None:
    """Raise InputError if too little of the text of this name is held out."""
    if text.val_fraction * text.size < _LEAST_HELD_OUT:
        raise InputError(
            f"{name} has fewer than {_LEAST_HELD_OUT} bytes of held-out text, which decides how long a run "
            "goes on: give more, prepare it with a larger --val_fraction, or leave --data.val_fraction out"
        )


def _zlib_ratio(texts: Iterable[str]) -> float:
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


def _given_vocabulary_size(given: Mapping[str, Json]) -> int | None:
    """Return the vocabulary's size; None if the plan chooses it."""
    name = given.get("data.vocabulary", "learn")
    size = given.get("model.config.vocab_size")
    if name == "learn" and size is None:
        return None
    return find_vocabulary(name, size or Tokenizer().n_vocab).n_vocab


def _print_plans(planner: Planner, times: list[float]) -> None:
    """Print a table with a plan for each of these minutes. InputError if the last ones do not suffice."""
    print("  ".join(_HEADINGS), flush=True)
    plans: list[Plan] = []
    for minutes in times:
        try:
            plans.append(planner.plan(minutes))
            print(_row(minutes, plans[-1]), flush=True)
        except InputError as error:  # the time is too short
            if minutes == times[-1]:
                raise
            print(error, flush=True)
    if not all(plan.is_whole for plan in plans):
        print("+  the run goes on for longer while the held-out loss falls")


def _row(minutes: float, plan: Plan) -> str:
    """Return a plan as a line of the table."""
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
        short(shape.memory(), "B"),
        short(plan.text.size, "B"),
    )
    return "  ".join(cell.rjust(len(name)) for cell, name in zip(cells, _HEADINGS, strict=True))


def _beside(weights: str, planner: Planner, given: Mapping[str, Json]) -> str:
    """Return a line with the score of weights that could be tuned instead."""
    context = given.get("model.config.context_length", TUNED_CONTEXT)
    bits, error = score_sample(weights, planner.text, context, given.get("trainer.accelerator", "auto"))
    return (
        f"{weights} as it is: {bits:.3f} ± {error:.2f} bits per byte of held-out text; where a run from "
        f"scratch stays above that, tune it instead: --model.init_from {weights}"
    )
