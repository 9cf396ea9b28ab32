"""How the engine calls a model: for the next tokens, and to read a prompt chunk by chunk.

Shapes: N rows, T tokens of each, V vocab_size.
"""

import inspect
from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import Tensor

from gpt.generation.cache import LayerCache, Read
from gpt.generation.decoding import has_hooks
from gpt.model import GPT

# The log-probability of a token in nats, and the likeliest ids in its place with theirs.
Score = tuple[float | None, tuple[tuple[int, float], ...]]
UNSCORED: Score = (None, ())


def window_start(length: int, context_length: int) -> int:
    """The first token that the model sees when it predicts the one after a text of `length` tokens."""
    shift = max(1, context_length // 2)
    return max(0, -(-(length - context_length) // shift) * shift)


class Forward:
    """Calls a model: `GPT.forward` in two parts, so that the head sees only the tokens that need logits, and
    a changed `forward` as it is.
    """

    def __init__(self, model: GPT) -> None:
        self.model, self.config = model, model.config
        weight = next(parameter for parameter in model.parameters() if parameter.is_floating_point())
        self.device, self.dtype = weight.device, weight.dtype
        own_forward = type(model).forward is not GPT.forward or "forward" in vars(model)
        self._in_parts = not (own_forward or has_hooks(model))
        called = inspect.signature(model.features if self._in_parts else model.forward)
        kinds = {parameter.kind for parameter in called.parameters.values()}
        # Whether the model takes caches; set to False if it turns out not to fill them.
        self.cached = "caches" in called.parameters or inspect.Parameter.VAR_KEYWORD in kinds

    def __call__(self, tokens: Sequence[Sequence[int]], *, every: bool = False, **inputs: Any) -> Tensor:
        """Logits (N, T, V) of `every` one of tokens (N, T), or (N, 1, V) of the last, which costs less."""
        given = torch.tensor([list(row) for row in tokens], device=self.device)  # (N, T)
        if not self._in_parts:
            return self.model(given, **inputs)
        features = self.model.features(given, **inputs)  # (N, T, D)
        return self.model.head(features if every else features[:, -1:])

    def read(self, reads: Sequence[Read]) -> list[Tensor]:
        """The logits (T, V) or (1, V) of each read, which are computed one after the other."""
        return [self._read(read) for read in reads]

    def _read(self, read: Read) -> Tensor:
        caches = [LayerCache(layer, read.held) for layer in read.store]
        logits = self([read.tokens], every=read.every, **({"caches": caches} if caches else {}))
        if any(cache.length != read.held + len(read.tokens) for cache in caches):
            self.cached = False  # the model ignores its caches
        return logits[0]


class Prefill:
    """Reads the last window of a prompt, at most `chunk` tokens at a time, into a cache where the model takes
    one. To compute the scores of all tokens, with `scored` alternatives of each, it reads every window.
    """

    def __init__(
        self, forward: Forward, tokens: Sequence[int], chunk: int, scored: int | None = None
    ) -> None:
        self.forward, self.tokens, self.chunk, self.scored = forward, tokens, chunk, scored
        self.start = 0  # the first token in the window
        self.store = torch.empty(0)  # its keys and values (layers, 2, H, T, K)
        self.logits = torch.empty(0)  # (1, V), of the token after the last one read
        self.scores = [UNSCORED] * (1 if scored is not None else len(tokens))  # nothing predicts the first
        self._reads = self._read()
        self._next: Read | None = None

    @property
    def next(self) -> Read | None:
        """What to read next; None at the end."""
        if inspect.getgeneratorstate(self._reads) == inspect.GEN_CREATED:
            self.take(None)  # only now, because those that wait should take no memory
        return self._next

    def take(self, logits: Tensor | None) -> None:
        """The logits (T, V) or (1, V) of what `next` was."""
        try:
            self._next = self._reads.send(logits)
        except StopIteration:
            self._next = None

    def _read(self) -> Generator[Read, Any, None]:
        forward, tokens, config = self.forward, self.tokens, self.forward.config
        first = len(tokens) if self.scored is None else 1
        for start in sorted({window_start(n, config.context_length) for n in range(first, len(tokens) + 1)}):
            read, last = start, min(start + config.context_length, len(tokens))
            shape = (config.num_layers, 2, config.num_heads, last - start, config.emb_dim // config.num_heads)
            self.store = torch.zeros(shape, device=forward.device, dtype=forward.dtype)
            self.start = start
            while read < last:
                if not forward.cached:
                    read, self.store = start, self.store[:0, :, :, :0]
                end = min(read + self.chunk, last) if forward.cached else last
                logits = yield Read(tokens[read:end], read - start, self.store, self.scored is not None)
                if len(self.store) and not forward.cached:  # this model has just ignored its cache
                    continue
                if self.scored is not None:
                    # The logits at a position predict the next token; earlier windows may have scored it.
                    known = len(self.scores)
                    targets = tokens[known : end + 1]
                    predicting = logits[known - 1 - read :][: len(targets)].float()
                    self.scores += scores(predicting, targets, self.scored)
                self.logits, read = logits[-1:], end


def scores(logits: Tensor, ids: Sequence[int], count: int) -> list[Score]:
    """The scores of ids (N,) under logits (N, V), each with this many alternatives."""
    log_probabilities = logits.log_softmax(dim=-1)  # (N, V)
    likeliest = log_probabilities.topk(min(count, logits.shape[-1]))
    index = torch.tensor(ids, dtype=torch.long, device=logits.device)[:, None]  # (N, 1)
    chosen = log_probabilities.gather(-1, index)[:, 0]  # (N,)
    rows = zip(chosen.tolist(), likeliest.indices.tolist(), likeliest.values.tolist(), strict=True)
    return [(chosen, tuple(zip(others, values, strict=True))) for chosen, others, values in rows]
