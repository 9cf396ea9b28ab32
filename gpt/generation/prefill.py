"""How the engine calls a model: for the next tokens, and to read a prompt chunk by chunk.

Shapes: N rows, T tokens of each, H heads, K width of a head, V vocab_size.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpt.attention import KeyValueCache
from gpt.generation.decoding import has_hooks
from gpt.model import GPT


def window_start(length: int, context_length: int) -> int:
    """The first token that the model sees when it predicts the one after a text of `length` tokens."""
    shift = max(1, context_length // 2)
    return max(0, -(-(length - context_length) // shift) * shift)


@dataclass(frozen=True)
class Score:
    """The log-probability of a token in nats, and the likeliest ids in its place with theirs."""

    log_probability: float | None = None
    alternatives: tuple[tuple[int, float], ...] = ()


class Forward:
    """Calls `model`: `GPT.forward` in two parts, so that the head sees only the tokens that need logits, and
    a changed `forward` as it is.

    Args:
        model: in evaluation mode.
    """

    def __init__(self, model: GPT) -> None:
        self.model, self.config = model, model.config
        weight = next(parameter for parameter in model.parameters() if parameter.is_floating_point())
        self.device, self.dtype = weight.device, weight.dtype
        self._in_parts = (
            type(model).forward is GPT.forward and "forward" not in vars(model) and not has_hooks(model)
        )
        called = inspect.signature(model.features if self._in_parts else model.forward)
        kinds = {parameter.kind for parameter in called.parameters.values()}
        self.cached = "caches" in called.parameters or inspect.Parameter.VAR_KEYWORD in kinds
        """Whether the model takes caches; set to False if it turns out not to fill them."""

    def __call__(
        self, tokens: Sequence[Sequence[int]], *, every: bool = True, skip: bool = False, **inputs: Any
    ) -> Tensor:
        """Logits (N, T, V), or (N, 1, V) of the last tokens.

        Args:
            tokens: (N, T).
            every: return the logits of all tokens, if they cost extra.
            skip: nothing but the caches is needed; the result may be empty.
            inputs: keyword arguments of `GPT.forward`.
        """
        given = torch.tensor([list(row) for row in tokens], device=self.device)  # (N, T)
        if not self._in_parts:
            return self.model(given, **inputs)
        features = self.model.features(given, **inputs)  # (N, T, D)
        if skip and not every:
            return features[:, :0]
        return self.model.head(features if every else features[:, -1:])

    def new_caches(self, length: int) -> list[KeyValueCache]:
        """Empty caches for one row of `length` tokens; none if the model takes none."""
        config = self.config
        shape = (1, config.num_heads, length, config.emb_dim // config.num_heads)
        layers = range(config.num_layers if self.cached else 0)
        return [KeyValueCache(*shape, device=self.device, dtype=self.dtype) for _ in layers]


class Prefill:
    """Reads a prompt chunk by chunk, into caches where the model takes them.

    Args:
        forward: calls the model.
        tokens: the prompt. Only the tokens in its last window are read.
        chunk: how many tokens to read in a step.
        scored: also compute the log-probability of each token and of this many alternatives, for which every
            window is read.
    """

    def __init__(
        self, forward: Forward, tokens: Sequence[int], chunk: int, scored: int | None = None
    ) -> None:
        self.forward, self.tokens, self.chunk, self.scored = forward, tokens, chunk, scored
        self.context_length = forward.config.context_length
        first = 1 if scored is not None else len(tokens)
        self._starts = sorted({window_start(n, self.context_length) for n in range(first, len(tokens) + 1)})
        self.scores: list[Score] = [] if scored is None else [Score()]  # nothing predicts the first token
        self.logits = torch.empty(0)
        """(1, V), of the token after the last; set when `done`."""
        self._open_window()

    def _open_window(self) -> None:
        self.start = self.read = self._starts.pop(0)
        self.end = min(self.start + self.context_length, len(self.tokens))
        self.caches = self.forward.new_caches(max(1, self.end - self.start))

    @property
    def done(self) -> bool:
        """Whether all tokens are read."""
        return self.read == len(self.tokens)

    def step(self) -> int:
        """Read a chunk and return how many tokens it has."""
        chunk = self.chunk if self.forward.cached else self.context_length
        tokens = self.tokens[self.read : min(self.read + chunk, self.end)]
        before, last = self.read, self.read + len(tokens) == len(self.tokens)
        if self.forward.cached:
            logits = self.forward([tokens], caches=self.caches, every=self.scored is not None, skip=not last)
            if any(cache.length != before + len(tokens) - self.start for cache in self.caches):
                self.forward.cached, self.caches = False, []  # the model ignores its caches
                self._starts.insert(0, self.start)
                self._open_window()
                return 0
        else:
            logits = self.forward([tokens], every=self.scored is not None)
        self.read += len(tokens)
        if self.scored is not None:
            # The logits at a position predict the next token; earlier windows may have scored it.
            first = len(self.scores) - 1 - before
            targets = self.tokens[before + first + 1 : self.read + 1]
            self.scores += scores(logits[0, first : first + len(targets)].float(), targets, self.scored)
        if last:
            self.logits = logits[:, -1]  # (1, V)
        elif self.read == self.end:
            self._open_window()
        return len(tokens)


def scores(logits: Tensor, ids: Sequence[int], count: int) -> list[Score]:
    """The scores of ids (N,) under logits (N, V)."""
    log_probabilities = logits.log_softmax(dim=-1)  # (N, V)
    likeliest = log_probabilities.topk(min(count, logits.shape[-1]))
    chosen = log_probabilities.gather(-1, torch.tensor(ids, dtype=torch.long, device=logits.device)[:, None])[
        :, 0
    ]  # (N,)
    return [
        Score(log_probability, tuple(zip(others, values, strict=True)))
        for log_probability, others, values in zip(
            chosen.tolist(), likeliest.indices.tolist(), likeliest.values.tolist(), strict=True
        )
    ]
