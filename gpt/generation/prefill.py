"""How the engine reads a text: chunk by chunk, and window by window where the whole text is scored.

Shapes: N rows, T tokens, V vocab_size.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gpt.generation.cache import Read, new_store
from gpt.generation.decoding import Way

if TYPE_CHECKING:
    from gpt.generation.engine import Sample

# The log-probability of a token in nats, and the likeliest ids in its place with theirs.
Score = tuple[float | None, tuple[tuple[int, float], ...]]
UNSCORED: Score = (None, ())


def window_start(length: int, context_length: int) -> int:
    """The first token that the model sees when it predicts the one after a text of `length` tokens."""
    shift = max(1, context_length // 2)
    return max(0, -(-(length - context_length) // shift) * shift)


class Prefill:
    """Reads the last window of a text for the samples that continue it, a chunk at a time, into a cache where
    the model has one; with `scored`, every window, for the scores of all tokens with so many alternatives.
    """

    part: Read  # the part that is read next
    logits: Tensor  # (1, V), of the token after the last one read

    def __init__(
        self,
        way: Way,
        chunk: int,
        samples: "Iterable[Sample]",
        tokens: Sequence[int],
        scored: int | None = None,
    ) -> None:
        self.way, self.tokens, self.scored = way, tokens, scored
        self.samples = deque(samples)  # that wait for it
        self.context = way.config.context_length
        self.chunk = chunk if way.cached else self.context
        # The first token of the window, and the next one to read.
        self.start = self.read = window_start(len(tokens), self.context) if scored is None else 0
        self.store = new_store(way.config, 0, way.like)  # (layers, 2, H, T, K) of the window
        self.scores = [UNSCORED] * (1 if scored is not None else len(tokens))  # nothing predicts the first

    @property
    def done(self) -> bool:
        """Whether all is read."""
        return self.read == len(self.tokens)

    @property
    def columns(self) -> int:
        """Of a cache for the text and its new tokens, but for no more of these than it has tokens now."""
        length = min(len(self.tokens), self.context)
        new = max((sample.request.max_new_tokens - sample.new_tokens for sample in self.samples), default=0)
        return min(length + math.ceil(min(new, length)), self.context)

    def next(self) -> Read:
        """Choose the next part."""
        last = min(self.start + self.context, len(self.tokens))
        if self.read == self.start:  # only now: those that wait should take no memory
            columns = last - self.start if self.way.cached else 0
            self.store = new_store(self.way.config, columns, self.way.like)
        end = min(self.read + self.chunk, last)
        tokens = self.tokens[self.read : end]
        held, scored = self.read - self.start, 1 if self.scored is None else len(tokens)
        self.part = Read(tokens, held, self.store, scored)
        return self.part

    def take(self, logits: Tensor) -> None:
        """The logits (T, V) or (1, V) of the part."""
        end = self.read + len(self.part.tokens)
        if self.scored is not None:
            # The logits at a position predict the next token; earlier windows may have scored it.
            known = len(self.scores)
            targets = self.tokens[known : end + 1]
            predicting = logits[known - 1 - self.read :][: len(targets)].float()
            self.scores += scores(predicting, targets, self.scored)
        self.logits, self.read = logits[-1:], end
        if end == self.start + self.context < len(self.tokens):
            self.start = self.read = window_start(end + 1, self.context)


def scores(logits: Tensor, ids: Sequence[int], count: int) -> list[Score]:
    """The scores of ids (N,) under logits (N, V), each with this many alternatives."""
    log_probabilities = logits.log_softmax(dim=-1)  # (N, V)
    likeliest = log_probabilities.topk(min(count, logits.shape[-1]))
    index = torch.tensor(ids, dtype=torch.long, device=logits.device)[:, None]  # (N, 1)
    chosen = log_probabilities.gather(-1, index)[:, 0]  # (N,)
    rows = zip(chosen.tolist(), likeliest.indices.tolist(), likeliest.values.tolist(), strict=True)
    return [(chosen, tuple(zip(others, values, strict=True))) for chosen, others, values in rows]
