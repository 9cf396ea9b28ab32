"""The best run for a text within a time: what each of many shapes would take and reach."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from gpt.errors import InputError
from gpt.training.plan.cost import Cost, Shape
from gpt.training.plan.law import Law
from gpt.training.plan.text import Text, held_out

CHOICES: dict[str, tuple[int, ...]] = {
    "model.config.context_length": (64, 128, 256, 512, 1024),
    "model.config.emb_dim": (32, 64, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1024),
    "model.config.num_layers": (1, 2, 3, 4, 6, 8, 12, 16, 24),
}
"""What a plan chooses from, besides the vocabulary and the batch; options given by hand take their place."""

GIVEN = (
    *CHOICES,
    "model.config.vocab_size",
    "model.config.num_heads",
    "data.batch_size",
    "data.val_fraction",
)
_WIDTH_AND_DEPTH = {"model.config.emb_dim", "model.config.num_layers"}
_BATCH_TOKENS = tuple(1536 << i for i in range(9))
_MOST_PASSES = 20  # over a text: the law knows nothing of more, which learn it by heart
_MOST_VALIDATIONS = 4
_SAMPLE_SECONDS = 0.7  # the text that is written at each
_FEWEST_WINDOWS = 6  # of a batch: fewer look at too few places of the text
_FEWEST_STEPS = 50
_MOST_WEIGHTS = 5  # for each byte of text: few cells of the law have more
_OCCURRENCES = 100  # tokens of text for each id, on average: with 84, 4,096 ids were 3 % worse than 2,048
_DOUBT = 0.05  # of the bits per byte: by so much must a run be better that the law was not measured for
_TOKENIZED = 3e6  # bytes a second, learning the vocabulary too
END_SECONDS = 2.0  # after the last validation: a checkpoint, the loss curve, the end of the process
_COMPILED_MINUTES = 10  # in less, most of a GPU's time would go into compiling, which is not planned for
_WORTH = 0.005  # of the bits per byte: less is no reason to train longer


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run, and what is expected of it."""

    minutes: float
    shape: Shape
    num_heads: int
    steps: int
    val_fraction: float
    text: Text
    seconds: float
    """Of the whole process."""
    validation: float
    """Seconds of one."""
    bits_per_byte: float
    extrapolates: bool
    """Whether the law was not measured so far."""

    @property
    def tokens(self) -> int:
        """Trained on, over all passes."""
        return int(self.steps * self.shape.tokens)

    @property
    def passes(self) -> float:
        """Over the text that is not held out."""
        size = self.text.size * (1 - self.val_fraction)
        return float(self.tokens * self.text.bytes_per_token[self.shape.vocab_size] / size)

    @property
    def takes_all_of_it(self) -> bool:
        """Whether the run needs the whole time, and not less because the text has no more to give."""
        return self.seconds > 0.9 * 60 * self.minutes

    def compared(self, seconds: float, summary: Mapping[str, Any]) -> dict[str, dict[str, float]]:
        """What was planned and what was reached, for summary.json."""
        planned = self.seconds, self.tokens, self.bits_per_byte
        reached = seconds, summary["tokens"], summary["val_bits_per_byte"]
        names = ("seconds", "tokens", "bits_per_byte")
        found = {"planned": planned, "reached": reached}
        return {which: dict(zip(names, numbers, strict=True)) for which, numbers in found.items()}

    def options(self, law: Law) -> dict[str, Any]:
        """The run as options of `gpt fit`."""
        shape = self.shape
        model = {name.rpartition(".")[2]: getattr(shape, name.rpartition(".")[2]) for name in CHOICES}
        every = math.ceil(self.steps / (_validations(self.minutes) - 0.5))  # the last step has one anyway
        lr, rest_lr = law.learning_rates(self.steps)
        return {
            "run": "planned",
            "checkpoint_every": max(every, 100),
            "model": {
                "config": {**model, "num_heads": self.num_heads, "vocab_size": shape.vocab_size},
                "optimizer": {
                    **{"lr": lr, "rest_lr": rest_lr, "weight_decay": law.weight_decay},
                    **{"embedding_weight_decay": 0.2, "warmup_steps": min(50, self.steps // 10)},
                    "schedule": "linear",
                },
                "loss_chunk": 2048,
                **({} if self.minutes >= _COMPILED_MINUTES else {"compile": False}),
            },
            "data": {
                **{"vocabulary": "learn", "batch_size": shape.batch_size, "shift": True},
                "val_fraction": round(self.val_fraction, 6),
            },
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
    shape, heads = _candidates(text, given)
    val_fraction = text.held_out or held_out(text.size, given.get("data.val_fraction"))
    per_token = np.vectorize(text.bytes_per_token.__getitem__, otypes=[float])(shape.vocab_size)
    unique = text.size * (1 - val_fraction)
    around = start + END_SECONDS + (0.0 if text.held_out else text.size / _TOKENIZED)
    validation = _SAMPLE_SECONDS + cost.validation(shape, val_fraction * text.size / per_token)
    around = around + _validations(minutes) * validation
    step, fits = cost.step(shape), shape.memory() < cost.memory
    fits &= shape.context_length * per_token < unique / 4
    fits &= (unique / per_token >= _OCCURRENCES * shape.vocab_size) | (
        shape.vocab_size == min(text.bytes_per_token)
    )
    if not _WIDTH_AND_DEPTH & set(given):
        fits &= shape.blocks + shape.table <= _MOST_WEIGHTS * unique
    if not fits.any():
        options = "".join(f" --{name} {value:g}" for name, value in given.items())
        raise InputError(
            f"no model fits {text.size:,} bytes of text{options}: expected four windows of text, a byte for "
            f"each {_MOST_WEIGHTS} weights, heads that divide the width, and the memory of a step"
        )
    needed = 1.05 * np.where(fits, around + _FEWEST_STEPS * step, np.inf).min() / 60
    if minutes < needed:
        enough = float(f"{1.05 * needed:.2g}")  # not rounded to less
        raise InputError(f"{minutes:g} minutes do not suffice to start: give at least {enough:g}")
    steps = np.floor((60 * minutes - around) / step)
    possible = fits & (steps >= _FEWEST_STEPS)
    most = np.maximum(_MOST_PASSES * unique / per_token / shape.tokens, 2 * _FEWEST_STEPS)
    # All of it or a part, (parts, candidates): more may do nothing but learn the text by heart.
    steps = np.maximum(np.minimum(steps, most) * 0.5 ** np.arange(0, 16, 0.5)[:, None], _FEWEST_STEPS)
    seen = steps * shape.tokens * per_token
    measured = {"blocks": shape.blocks, "context": shape.context_length, "batch": shape.tokens}
    measured |= {"seen": seen, "unique": unique}
    bits = law.bits_per_byte(text.trial, table=shape.table, per_token=per_token, **measured)
    covered = law.covers(**measured)
    wanted = np.where(possible, bits * np.where(covered, 1, 1 + _DOUBT), np.inf)
    part, i = map(int, np.unravel_index(wanted.argmin(), bits.shape))
    kind = {"trial": text.trial.bits_per_byte, "repeats": text.trial.repeats, "per_token": per_token[i]}
    chosen = Shape(**{field.name: getattr(shape, field.name)[i].item() for field in fields(Shape)})
    return Plan(
        minutes=minutes,
        shape=chosen,
        num_heads=int(heads[i]),
        steps=int(steps[part, i]),
        val_fraction=val_fraction,
        text=text,
        seconds=float(around[i] + int(steps[part, i]) * step[i]),
        validation=float(validation[i]),
        bits_per_byte=float(bits[part, i]),
        extrapolates=not (covered[part, i] and law.covers(table=chosen.table, **kind)),
    )


def _validations(minutes: float) -> int:
    """How many a run has."""
    return int(min(max(1.0, minutes), _MOST_VALIDATIONS))


def is_worth(longer: Plan, plan: Plan) -> bool:
    """Whether a longer plan for the same text reaches enough more."""
    return longer.bits_per_byte < plan.bits_per_byte * (1 - _WORTH)


def _candidates(text: Text, given: Mapping[str, float]) -> tuple[Shape, Any]:
    """All shapes that the options allow, and their heads."""
    choices = [(int(given[name]),) if name in given else values for name, values in CHOICES.items()]
    batch = "data.batch_size"
    batches = (int(given[batch]),) if batch in given else _BATCH_TOKENS
    grid = np.meshgrid(list(text.bytes_per_token), *choices, batches, indexing="ij")
    vocab_size, context, width, layers, windows = (axis.ravel() for axis in grid)
    windows = windows if batch in given else windows // context
    divisors = {w: [n for n in range(1, 1 + w // (64 if w >= 384 else 32)) if w % n == 0] for w in choices[1]}
    heads = np.vectorize(lambda w: divisors[w][-1] if divisors[w] else 1, otypes=[int])(width)
    if "model.config.num_heads" in given:
        heads = np.full_like(width, int(given["model.config.num_heads"]))
    kept = (width % heads == 0) & (windows >= (1 if batch in given else _FEWEST_WINDOWS))
    if not _WIDTH_AND_DEPTH & set(given):  # neither a tower nor a pancake
        kept &= (layers >= width / 96) & (layers <= np.maximum(width / 16, 1))
    shape = Shape(
        vocab_size=vocab_size[kept],
        context_length=context[kept],
        emb_dim=width[kept],
        num_layers=layers[kept],
        batch_size=windows[kept],
    )
    return shape, heads[kept]
