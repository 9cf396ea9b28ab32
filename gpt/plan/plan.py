"""The best run for a text within a time: what each of many shapes would take and reach."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from gpt.errors import InputError
from gpt.plan.cost import Cost, Shape
from gpt.plan.law import Law
from gpt.plan.text import Text

CHOICES: dict[str, tuple[int, ...]] = {
    "model.config.context_length": (64, 128, 256, 512, 1024),
    "model.config.emb_dim": (32, 64, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1024),
    "model.config.num_layers": (1, 2, 3, 4, 6, 8, 12, 16, 24),
}
"""What a plan chooses from, besides the vocabulary and the batch; options given by hand take their place."""

_HEADS, _WINDOWS = "model.config.num_heads", "data.batch_size"
GIVEN = (*CHOICES, "model.config.vocab_size", _HEADS, _WINDOWS, "data.val_fraction")
_BATCH_TOKENS = tuple(1536 << i for i in range(9))
_MOST_PASSES = 20  # over a text: the law knows nothing of more, which learn it by heart
_MOST_VALIDATIONS = 4
_SAMPLE_SECONDS = 0.7  # the text that is written at each
_FEWEST_WINDOWS = 6  # of a batch: fewer look at too few places of the text
_FEWEST_STEPS = 50
_MOST_WEIGHTS = 5  # for each byte of text: few cells of the law have more
_OCCURRENCES = 100  # tokens of text for each id, on average: with 84, 4,096 tokens were 3 % worse than 2,048
_DOUBT = 0.05  # of the bits per byte: by so much must a run be better that the law was not measured for
END_SECONDS = 2.0  # after the last validation: a checkpoint, the loss curve, the end of the process
_COMPILED_MINUTES = 10  # in less, most of a GPU's time would go into compiling, which is not planned for


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run, and what is expected of it."""

    minutes: float
    shape: Shape
    num_heads: int
    steps: int
    text: Text
    seconds: float  # of the whole process
    validation: float  # seconds of one
    bits_per_byte: float
    extrapolates: bool  # the law was not measured so far

    def __str__(self) -> str:
        shape, far = self.shape, " (extrapolated)" * self.extrapolates
        rest = (
            "" if self.takes_all_of_it else f" of {60 * self.minutes:.0f}: longer gains nothing on this text"
        )
        return (
            f"the plan is {shape.emb_dim} x {shape.num_layers} (width x layers), {shape.vocab_size} ids, "
            f"{self.steps} steps of {shape.batch_size} x {shape.context_length} tokens, "
            f"{self.bits_per_byte:.4g}{self.error} bits per byte{far} in {self.seconds:.0f} s{rest}"
            f"{self.part}"
        )

    @property
    def error(self) -> str:
        """The standard error of the bits per byte, as far as it comes from what is held out."""
        error = self.text.error * self.bits_per_byte
        return f" ± {error:.2g}" if math.isfinite(error) else ""

    @property
    def part(self) -> str:
        """How much of a longer text it reads."""
        most = self.text.most_bytes
        return f"; of the text it reads {most / 1e6:,.0f} MB" if most else ""

    @property
    def tokens(self) -> int:
        """Trained on, over all passes."""
        return int(self.steps * self.shape.tokens)

    @property
    def passes(self) -> float:
        """Over the text that is not held out."""
        return self.tokens * self.text.bytes_per_token[self.shape.vocab_size] / self.text.train_bytes

    @property
    def takes_all_of_it(self) -> bool:
        """Whether the run needs the whole time, and not less because the text has no more to give."""
        return self.seconds > 0.9 * 60 * self.minutes

    def compared(self, seconds: float, summary: Mapping[str, Any]) -> dict[str, dict[str, float]]:
        """What was planned and what was reached, for summary.json."""
        planned = {"seconds": self.seconds, "tokens": self.tokens, "bits_per_byte": self.bits_per_byte}
        reached = {"seconds": seconds, "tokens": summary["tokens"]}
        return {"planned": planned, "reached": {**reached, "bits_per_byte": summary["val_bits_per_byte"]}}

    def options(self, law: Law) -> dict[str, Any]:
        """The run as options of `gpt fit`."""
        config = {**asdict(self.shape), "num_heads": self.num_heads}
        data = {"vocabulary": "learn", "batch_size": config.pop("batch_size"), "shift": True}
        every = math.ceil(self.steps / (_validations(self.minutes) - 0.5))  # the last step has one anyway
        lr, rest_lr = law.learning_rates(self.steps)
        optimizer = {"lr": lr, "rest_lr": rest_lr, "schedule": "linear"}
        optimizer["warmup_steps"] = min(50, self.steps // 10)
        optimizer |= {"weight_decay": law.weight_decay, "embedding_weight_decay": 0.2}
        compiled = {} if self.minutes >= _COMPILED_MINUTES else {"compile": False}
        return {
            "run": "planned",
            "checkpoint_every": max(every, 100),
            "model": {"config": config, "optimizer": optimizer, "loss_chunk": 2048, **compiled},
            "data": {**data, "most_bytes": self.text.most_bytes},
            "trainer": {"max_steps": self.steps, "val_check_interval": every, "devices": 1},
        }


def choose(
    text: Text, cost: Cost, law: Law, minutes: float, given: Mapping[str, float], start: float = 8.0
) -> Plan:
    """The plan that reaches the fewest bits per byte.

    Args:
        given: options by their names in `GIVEN`, which are kept.
        start: seconds from the start of the process to the first step, without tokenizing.

    Raises:
        InputError: the minutes do not suffice to start, or no model fits into the time and the memory.
    """
    shape, per_token = _candidates(text, given, cost.memory)
    validation = _SAMPLE_SECONDS + cost.validation(shape, text.val_fraction * text.size / per_token)
    around = start + END_SECONDS + text.tokenizing
    around = around + _validations(minutes) * validation
    step = cost.step(shape)
    needed = 1.05 * (around + _FEWEST_STEPS * step).min() / 60
    if minutes < needed:
        enough = float(f"{1.05 * needed:.2g}")  # not rounded to less
        raise InputError(f"{minutes:g} minutes do not suffice to start: give at least {enough:g}")
    in_time = np.floor((60 * minutes - around) / step)
    most = np.maximum(_MOST_PASSES * text.train_bytes / per_token / shape.tokens, 2 * _FEWEST_STEPS)
    # All of it or a part, (parts, candidates): more may do nothing but learn the text by heart.
    steps = np.maximum(np.minimum(in_time, most) * 0.5 ** np.arange(0, 16, 0.5)[:, None], _FEWEST_STEPS)
    seen = steps * shape.tokens * per_token
    measured = {"blocks": shape.blocks, "context": shape.context_length, "batch": shape.tokens}
    measured |= {"seen": seen, "unique": text.train_bytes}
    bits = law.bits_per_byte(text.trial, table=shape.table, per_token=per_token, **measured)
    covered = law.covers(**measured)
    wanted = np.where(in_time >= _FEWEST_STEPS, bits * np.where(covered, 1, 1 + _DOUBT), np.inf)
    part, i = map(int, np.unravel_index(wanted.argmin(), bits.shape))
    kind = {"trial": text.trial.bits_per_byte, "repeats": text.trial.repeats, "per_token": per_token[i]}
    chosen = Shape(**{name: int(sizes[i]) for name, sizes in vars(shape).items()})
    return Plan(
        minutes=minutes,
        shape=chosen,
        num_heads=int(given.get(_HEADS, 0)) or _heads(chosen.emb_dim),
        steps=int(steps[part, i]),
        text=text,
        seconds=float(around[i] + int(steps[part, i]) * step[i]),
        validation=float(validation[i]),
        bits_per_byte=float(bits[part, i]),
        extrapolates=not (covered[part, i] and law.covers(table=chosen.table, **kind)),
    )


def _validations(minutes: float) -> int:
    """How many a run has."""
    return int(min(max(1.0, minutes), _MOST_VALIDATIONS))


def _heads(width: int) -> int:
    """The most heads, at least 32 wide and in wide models 64, that divide a width."""
    most = max(1, width // (64 if width >= 384 else 32))
    return next(heads for heads in range(most, 0, -1) if width % heads == 0)


def _candidates(text: Text, given: Mapping[str, float], memory: float) -> tuple[Shape, Any]:
    """All shapes that fit the text, the options and the memory, and the bytes of their tokens."""
    choices = [(int(given[name]),) if name in given else values for name, values in CHOICES.items()]
    grid = np.meshgrid(list(text.bytes_per_token), *choices, _BATCH_TOKENS, indexing="ij")
    vocab_size, context, width, layers, tokens = (axis.ravel() for axis in grid)
    windows = np.full_like(tokens, int(given[_WINDOWS])) if _WINDOWS in given else tokens // context
    shape = Shape(vocab_size, context, width, layers, windows)
    per_token = np.vectorize(text.bytes_per_token.__getitem__, otypes=[float])(vocab_size)
    fits = (width % int(given.get(_HEADS, 1)) == 0) & (shape.memory() < memory)
    fits &= (windows >= _FEWEST_WINDOWS) | (_WINDOWS in given)
    fits &= context * per_token < text.train_bytes / 4
    supported = text.train_bytes / per_token >= _OCCURRENCES * vocab_size
    fits &= supported | (vocab_size == min(text.bytes_per_token))
    if not {"model.config.emb_dim", "model.config.num_layers"} & set(given):
        fits &= (layers >= width / 96) & (layers <= np.maximum(width / 16, 1))  # no tower, no pancake
        weights = 1.0 * (shape.blocks + shape.table)  # of a short text, those of the smallest model
        fits &= weights <= max(_MOST_WEIGHTS * text.train_bytes, weights[fits].min(initial=np.inf))
    if not fits.any():
        options = "".join(f" --{name} {value:g}" for name, value in given.items())
        raise InputError(
            f"no model fits {text.size:,} bytes of text{options}: expected four windows of text, a byte for "
            f"each {_MOST_WEIGHTS} weights, heads that divide the width, and the memory of a step"
        )
    return Shape(**{name: sizes[fits] for name, sizes in vars(shape).items()}), per_token[fits]
