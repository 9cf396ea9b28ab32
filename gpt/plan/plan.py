"""The best run for a text within a time: what each of many shapes would take and reach."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from gpt.errors import InputError
from gpt.plan.cost import Cost, Shape
from gpt.plan.law import STEADY, Law
from gpt.plan.text import BPE_DROPOUT, Text
from gpt.training.sampled import LATE, LATE_RATE
from gpt.training.schedule import learning_rates

_DROPOUT = "model.config.dropout"
CHOICES: dict[str, tuple[float, ...]] = {
    "model.config.context_length": (64, 128, 256, 512),
    "model.config.emb_dim": (32, 64, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1024),
    "model.config.num_layers": (1, 2, 3, 4, 6, 8, 12),
    _DROPOUT: (0.0, 0.1, 0.2),
}
"""What a plan chooses from, besides the vocabulary and the batch; options given by hand take their place."""

_HEADS = "model.config.num_heads"
_WINDOWS = "data.batch_size"
SHARES = (_DROPOUT, "data.val_fraction")
GIVEN = (*CHOICES, "model.config.vocab_size", _HEADS, _WINDOWS, "data.val_fraction")
VALIDATIONS = 5
"""Of all steps, at most: points enough to see whether the curve still falls."""
_VALIDATING = 0.04  # of the time, where two take no longer
_BESIDE = 16_384  # tokens scored in the time of a validation's temperature, sample and checkpoint
PATIENCE = 3
"""Validations in a row, each worse than the one before, end a run for a time."""
_BATCH_TOKENS = 1536 << np.arange(9)
_LONGER = 0.01  # of the bits per byte: by so much must half of the steps be better to be taken
_DROPPING = 1.3  # times as long takes a step with dropout, at most
_FEWEST_WINDOWS = 6  # of a batch: fewer look at too few places of the text
_FEWEST_STEPS = 50
_MOST_WEIGHTS = 5  # for each byte of text: few cells of the law have more
_MOST_PASSES = 60  # over the text: two cells of the law have more
_FEWEST_BYTES_FOR_ID = 225  # of text: with so many, 4,096 ids were 2 % better than 2,048
_DOUBT = 0.05  # of the bits per byte: by so much must a run be better that the law was not measured for
END_SECONDS = 1.2  # after the last validation: a checkpoint, the loss curve, the end of the process


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run, and what is expected of it."""

    minutes: float
    shape: Shape
    num_heads: int
    dropout: float
    bpe_dropout: float
    sampled_softmax: int
    slower: float  # so many times as long takes a step of the last fifth, whose samples are larger
    steps: int
    text: Text
    seconds: float  # of the whole process
    validations: int
    validation: float  # seconds of one
    bits_per_byte: float
    error: float  # of the bits per byte: that of the law on new texts, and of what is held out
    is_whole: bool  # takes all of the time, not a part until held-out text shows whether more gains
    extrapolates: bool  # the law was not measured so far

    def __str__(self) -> str:
        far = " (extrapolated)" if self.extrapolates else ""
        forgets = f"dropout {self.dropout:g}, " if self.dropout else ""
        part = f"; of the text it reads {self.text.most_bytes / 1e6:,.0f} MB" if self.text.most_bytes else ""
        rest = "" if self.is_whole else f" of {60 * self.minutes:.0f}, and longer while held-out text gains"
        return (
            f"the plan is {self.shape.emb_dim} x {self.shape.num_layers} (width x layers), "
            f"a {self.shape.vocab_size}-token vocabulary, {forgets}"
            f"{self.steps} steps of {self.shape.batch_size} x {self.shape.context_length} tokens, "
            f"{self.bits_per_byte:.4g} ± {self.error:.2g} bits per byte{far} in {self.seconds:.0f} s{rest}"
            f"{part}"
        )

    @property
    def tokens(self) -> int:
        """Trained on, over all passes."""
        return self.steps * self.shape.tokens

    @property
    def passes(self) -> float:
        """Over the text that is not held out."""
        return self.tokens * self.text.bytes_per_token[self.shape.vocab_size] / self.text.train_bytes

    def compared(self, seconds: float, summary: Mapping[str, Any]) -> dict[str, dict[str, float]]:
        """What was planned and what the best checkpoint has reached, for summary.json."""
        best = summary["val_bits_per_byte"] * summary["best_loss"] / (summary["val_loss"] or 1)
        return {
            "planned": {
                name: getattr(self, name) for name in ("seconds", "tokens", "bits_per_byte", "error")
            },
            "reached": {"seconds": seconds, "tokens": summary["tokens"], "bits_per_byte": best},
        }

    def options(self) -> dict[str, Any]:
        """The run as options of `gpt fit`."""
        config = {
            **asdict(self.shape),
            "num_heads": self.num_heads,
            "dropout": self.dropout,
            "exact_gelu": True,  # it takes less time than its approximation, or as much
        }
        data = {
            "vocabulary": "learn",
            "batch_size": config.pop("batch_size"),
            "shift": True,
            "bpe_dropout": self.bpe_dropout,
            "most_bytes": self.text.most_bytes,
        }
        lr, rest_lr = learning_rates(self.steps, self.shape.emb_dim, self.shape.tokens)
        return {
            "run": "planned",
            "early_stopping": PATIENCE,
            "temperature_scaling": True,
            "model": {
                "config": config,
                "sampled_softmax": self.sampled_softmax,
                "optimizer": {
                    "lr": lr,
                    "rest_lr": rest_lr,
                    "warmup_steps": min(50, self.steps // 10),
                    "weight_decay": 0.4,
                    "embedding_weight_decay": 0.2,
                    "betas": (0.8, 0.99),  # few tokens of a small batch have a rare id
                },
            },
            "data": data,
            "trainer": {
                "max_steps": self.steps,
                "val_check_interval": math.ceil(self.steps / self.validations),
                "devices": 1,
            },
        }


def choose(text: Text, cost: Cost, law: Law, minutes: float, given: Mapping[str, Any], start: float) -> Plan:
    """The plan that reaches the fewest bits per byte.

    Args:
        given: options by their names in `GIVEN`, which are kept.
        start: seconds from the start of the process to the first step, without tokenizing.

    Raises:
        InputError: the minutes do not suffice to start, or no model fits into the time and the memory.
    """
    trial = text.trial
    shape, per_token, respelled, dropout = _candidates(text, given, cost.memory)
    step = cost.step(shape, cost.sampled_softmax)
    late = cost.step(shape, min(LATE_RATE, cost.sampled_softmax))
    slower = late / step
    step += LATE * (late - step)
    scored = text.val_fraction * text.size / per_token + _BESIDE
    validation = cost.step(shape) / 3 * scored / shape.tokens  # scores all ids
    validations = np.clip(_VALIDATING * 60 * minutes / validation, 2, VALIDATIONS)
    around = start + END_SECONDS + text.tokenizing + validations * validation
    step = step * _DROPPING ** (dropout > 0) + respelled * shape.tokens * text.respelling
    check_time(minutes, (around + _FEWEST_STEPS * step).min())
    in_time = (60 * minutes - around) / step
    # All of it, half, a quarter, (parts, candidates): more may only learn the text by heart. A run is
    # extended while its held-out loss falls, so of two parts that promise the same it takes the longer.
    halved = np.arange(24)[:, None]
    steps = np.maximum(in_time * 0.5**halved, _FEWEST_STEPS)
    chosen = {"blocks": shape.blocks, "context": shape.context_length, "batch": shape.tokens}
    amounts = {
        "table": shape.table,
        "per_token": per_token,
        "seen": steps * shape.tokens * per_token,
        "unique": text.train_bytes,
    }
    bits = law.bits_per_byte(trial, **chosen, **amounts, respelled=respelled, dropout=dropout)
    unknown = law.outside(**chosen) | (amounts["seen"] > _MOST_PASSES * text.train_bytes)
    wanted = bits * (1 + _DOUBT * unknown) * (1 + _LONGER * halved)
    pace = law.pace(trial)
    # A text learned faster than any measured mostly needs what is learned by heart: dropout costs more.
    wanted *= 1 + law.error * law.outside(pace=pace) * (dropout > 0)
    wanted[:, in_time < _FEWEST_STEPS] = np.inf
    part, i = np.unravel_index(wanted.argmin(), wanted.shape)
    unknown |= law.outside(**amounts, trial=trial.bits_per_byte.mean(), pace=pace)
    made = int(steps[part, i])
    reached = bits[part, i]
    best = Shape(*(int(sizes[i]) for sizes in vars(shape).values()))
    return Plan(
        minutes=minutes,
        shape=best,
        num_heads=given.get(_HEADS) or _heads(best.emb_dim),
        dropout=float(dropout[i]),
        bpe_dropout=BPE_DROPOUT * bool(respelled[i]),
        sampled_softmax=cost.sampled_softmax,
        slower=slower[i],
        steps=made,
        text=text,
        seconds=around[i] + made * step[i],
        validations=int(validations[i]),
        validation=validation[i],
        bits_per_byte=reached,
        error=reached * math.hypot(law.error * max(STEADY, pace), text.error),
        is_whole=part == 0,
        extrapolates=bool(unknown[part, i]),
    )


def check_time(minutes: float, seconds: float) -> None:
    """InputError for fewer minutes than the seconds that are needed."""
    if 60 * minutes < seconds:
        raise InputError(
            f"{minutes:g} minutes do not suffice to start: give at least {1.1 * seconds / 60:.2f}"
        )


def _heads(width: int) -> int:
    """The most heads, at least 32 wide and in wide models 64, that divide a width."""
    most = width // (64 if width >= 384 else 32) or 1
    return next(heads for heads in range(most, 0, -1) if not width % heads)


def _candidates(text: Text, given: Mapping[str, Any], memory: float) -> tuple[Shape, Any, Any, Any]:
    """All shapes that fit text, options and memory; their bytes of a token, BPE-dropout (1 or 0), dropout."""
    choices = [(given[name],) if name in given else values for name, values in CHOICES.items()]
    grid = np.meshgrid(list(text.bytes_per_token), *choices, _BATCH_TOKENS, (0, 1), indexing="ij")
    vocab_size, context, width, layers, dropout, tokens, respelled = (axis.ravel() for axis in grid)
    windows = np.full_like(tokens, given[_WINDOWS]) if _WINDOWS in given else tokens // context
    shape = Shape(vocab_size, context, width, layers, windows)
    per_token = np.vectorize(text.bytes_per_token.__getitem__)(vocab_size)
    fits = (width % given.get(_HEADS, 1) == 0) & (shape.memory() < memory)
    fits &= respelled >= (dropout > 0)  # dropout alone was tried on one text
    fits &= (windows >= _FEWEST_WINDOWS) | (_WINDOWS in given)
    fits &= context * per_token < text.train_bytes / 4
    supported = text.train_bytes >= _FEWEST_BYTES_FOR_ID * vocab_size
    fits &= supported | (vocab_size == min(text.bytes_per_token))
    if {"model.config.emb_dim", "model.config.num_layers"}.isdisjoint(given):
        fits &= (layers >= width / 128) & (layers <= width / 16)  # no tower, no pancake
        weights = 1.0 * (shape.blocks + shape.table)  # of a short text, those of the smallest model
        fits &= weights <= max(_MOST_WEIGHTS * text.train_bytes, weights[fits].min(initial=np.inf))
    if not fits.any():
        options = "".join(f" --{name} {value:g}" for name, value in given.items())
        raise InputError(
            f"no model fits {text.size:,} bytes of text{options}: expected four windows of text, a byte for "
            f"each {_MOST_WEIGHTS} weights, heads that divide the width, and the memory of a step"
        )
    shape = Shape(*(sizes[fits] for sizes in vars(shape).values()))
    return shape, per_token[fits], respelled[fits], dropout[fits]
