"""Held-out bits per byte as a function of the text, the model and the training: docs/planning.md explains it.

The form is that of Hoffmann et al. 2022 (equation 10) in bytes instead of tokens, with a term for the
vocabulary as in Tao et al. 2024, one for the length of the context, and one for what is learned by heart of a
text that is read again. What differs between texts is tried out: `Trial`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpt.files import shipped

_BATCH_POWER = 0.4  # of the bytes of the first pass: so grows the batch that wastes half, for a given loss
_SLOWEST = 0.05  # the pace of a text that a trial hardly learns
STEADY = 0.5
"""The pace below which a prediction becomes no better: its error is that of the law times the pace."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """How hard a text is: what a short training of a small model on it has reached.

    Each quarter of the held-out text, from the easiest windows to the hardest, has its own figures,
    (4,) or (4, texts): repeated code is learned much faster than the tables beside it.
    """

    bits_per_byte: Any
    earlier: Any  # bits per byte of the same after `earlier_seen` bytes
    earlier_seen: Any
    repeated: Any  # the share of its bits at tokens that follow the same token earlier in their window
    numbers: Mapping[str, Any]  # the arguments of `Law.usual`, numbers or (texts,)


@dataclass(frozen=True, kw_only=True)
class Law:
    """The constants, which scripts/scaling/fit.py has fitted to the tables beside it."""

    blocks: float
    blocks_power: float
    table: float  # of the embeddings' weights
    table_power: float
    bytes: float  # of the bytes seen, after the discounts below
    bytes_power: float
    token_power: float  # of a token's bytes: a token teaches more, the longer it is
    context: float  # of the bytes in a window
    context_power: float
    copying: float  # times `Trial.repeated`: how much the pace grows as a model learns, late, to copy
    batch: float  # batch size in tokens that halves a token's value after a million bytes
    window: float  # window length in tokens that halves a token's value: neighbours tell less than other text
    overfit: float  # of each pass after the first and each weight for a byte of text
    table_overfit: float  # so many times a weight of the embeddings counts there
    respelled: float  # with BPE-dropout a text is learned by heart so many times as much
    respelling: float  # the share that BPE-dropout costs, of a text that is learned as fast as usual
    dropped: float  # with dropout of 0.1 a text is learned by heart so many times as much
    dropping: float  # ten times the share that dropout of 0.1 costs
    scaled: float  # so many times as much is lost by heart after temperature scaling, as a planned run has it
    error: float  # of nine of ten predictions for other kinds of text, at most, a share, at a pace of 1
    measured: dict[str, tuple[float, float]]  # the least and the most of each number that was measured

    def bits_per_byte(
        self, text: Trial, *, respelled: Any = 0, dropout: Any = 0, scaled: Any = 1, **numbers: Any
    ) -> Any:
        """Of a training on a text, whose `numbers` are the arguments of `usual`.

        `respelled` is 1 with BPE-dropout, `scaled` 0 without temperature scaling.
        """
        overfit = self.scaled**scaled * self.respelled**respelled * self.dropped ** (10 * dropout)
        ratio = self.usual(**numbers, overfit=overfit) / self.usual(**text.numbers)
        ratio *= 1 + self.respelling * self.pace(text) ** 2 * respelled + self.dropping * dropout
        later = self.copying * text.repeated * np.maximum(-np.log(ratio), 0)
        quarters = zip(text.bits_per_byte, self.paces(text), strict=True)
        return sum(bits * ratio ** (pace + later) for bits, pace in quarters) / 4

    def pace(self, text: Trial) -> Any:
        """How fast all of a text is learned after its trial: 1 as fast as usual."""
        return np.average(self.paces(text), axis=0, weights=text.bits_per_byte)

    def paces(self, text: Trial) -> Any:
        """How fast each quarter was learned in the trial: 1 as fast as usual, at least a twentieth of it."""
        earlier = self.usual(**{**text.numbers, "seen": text.earlier_seen})
        usual = np.log(earlier / self.usual(**text.numbers))
        return np.maximum(np.log(text.earlier / text.bits_per_byte) / usual, _SLOWEST)

    def usual(
        self,
        *,
        blocks: Any,
        table: Any,
        context: Any,
        seen: Any,
        unique: Any,
        batch: Any,
        per_token: Any,
        overfit: Any = 1,
    ) -> Any:
        """Bits per byte of a text of which one remains after endless training. Numbers or arrays.

        Args:
            blocks, table: weights of the blocks' matrices and of the token embedding.
            context: tokens of a window.
            seen: bytes trained on, over all passes.
            unique: bytes of the text that is trained on.
            batch: tokens of an update.
            per_token: bytes of a token, in held-out text.
            overfit: how much of it is learned by heart, of as much as usual.
        """
        wasted = batch / self.batch * (np.minimum(seen, unique) / 1e6) ** -_BATCH_POWER
        effective = seen / (1 + wasted) / (1 + context / self.window) / per_token**self.token_power
        again = np.maximum(seen / unique, 1.0) - 1  # passes after the first
        by_heart = overfit * (blocks + self.table_overfit * table) / unique * again
        return (
            1
            + self.blocks * blocks**-self.blocks_power
            + self.table * table**-self.table_power
            + self.bytes * effective**-self.bytes_power
            + self.context * (context * per_token) ** -self.context_power
            + self.overfit * by_heart
        )

    def outside(self, **numbers: Any) -> Any:
        """Whether a number, by its name in `bits_per_byte`, lies outside the range that was measured."""
        return sum(number != np.clip(number, *self.measured[name]) for name, number in numbers.items()) > 0

    @classmethod
    def load(cls) -> "Law":
        """The law that comes with this package."""
        return cls(**json.loads((shipped("assets") / "law.json").read_text(encoding="utf-8")))
