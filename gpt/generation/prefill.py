"""How the engine calls a model: for the next tokens, and to read a text chunk by chunk.

Shapes: N rows, T tokens of each, V vocab_size.
"""

import inspect
import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpt.generation.cache import LayerCache, Read, RowCache, new_store
from gpt.generation.decoding import has_hooks, is_as_built
from gpt.generation.graphs import Graphs
from gpt.model import GPT

if TYPE_CHECKING:
    from gpt.generation.engine import Sample

# The log-probability of a token in nats, and the likeliest ids in its place with theirs.
Score = tuple[float | None, tuple[tuple[int, float], ...]]
UNSCORED: Score = (None, ())
# All but cuDNN's, PyTorch's first choice on a Hopper GPU: it builds a plan, up to a second, for every shape.
_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def to_device(numbers: Sequence[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Numbers as a tensor, without a wait for what a GPU is doing."""
    return torch.tensor(numbers, dtype=dtype).to(device, non_blocking=device.type == "cuda")


def window_start(length: int, context_length: int) -> int:
    """The first token that the model sees when it predicts the one after a text of `length` tokens."""
    shift = max(1, context_length // 2)
    return max(0, -(-(length - context_length) // shift) * shift)


class Forward:
    """Calls a model: `GPT.forward` in two parts, so that the head sees only the tokens that need logits, and
    a changed `forward` as it is. It reads texts `chunk` tokens at a time.
    """

    def __init__(self, model: GPT, chunk: int, graphs: bool = True) -> None:
        self.model, self.config, self.chunk = model, model.config, chunk
        self.weight = next(p for p in model.parameters() if p.is_floating_point()).detach()
        own_forward = type(model).forward is not GPT.forward or "forward" in vars(model)
        self._in_parts = not (own_forward or has_hooks(model))
        called = inspect.signature(model.features if self._in_parts else model.forward).parameters.values()
        # Whether the model takes caches; set to False if it turns out not to fill them.
        self.cached = any(one.name == "caches" or one.kind is one.VAR_KEYWORD for one in called)
        # A graph leaves out what a changed model may do beside computing.
        self._graphs = Graphs() if graphs and self.weight.is_cuda and _can_be_recorded(model) else None

    def read(self, read: Read) -> Tensor:
        """The logits (N, V) of the tokens to be scored."""
        caches = [LayerCache(layer, read.held) for layer in read.store] if self.cached else []
        tokens = to_device([list(read.tokens)], self.weight.device)
        logits = self._call(tokens, read.scored, **({"caches": caches} if caches else {}))[0]
        if any(cache.length != read.held + len(read.tokens) for cache in caches):
            self.cached = False  # the model ignores its caches
        return logits[-read.scored :]

    def step(self, tokens: Tensor, cache: RowCache) -> Tensor:
        """Append a token (N,) to each row of the cache; the logits (N, V) after them, until the next call."""

        def compute(tokens: Tensor, held: Tensor) -> Tensor:
            caches, positions, masked = cache.layers(held)
            given = tokens[:, None]  # (N, 1)
            return self._call(given, positions=positions, key_padding_mask=masked, caches=caches)[:, -1]

        inputs = tokens, to_device(cache.append(), tokens.device)
        return self._graphs(cache.place, compute, *inputs) if self._graphs else compute(*inputs)

    def _call(self, given: Tensor, scored: int = 1, **inputs: Any) -> Tensor:
        """Logits of at least the last `scored` of tokens (N, T): the fewer, the cheaper."""
        with sdpa_kernel(_KERNELS):
            if not self._in_parts:
                return self.model(given, **inputs)
            features = self.model.features(given, **inputs)  # (N, T, D)
        return self.model.head(features[:, -scored:])


def _can_be_recorded(model: GPT) -> bool:
    compiled = (getattr(module, "_compiled_call_impl", None) for module in model.modules())
    return is_as_built(model) and not any(compiled)


class Prefill:
    """Reads the last window of a text for the samples that continue it, a chunk at a time, into a cache where
    the model has one; with `scored`, every window, for the scores of all tokens with so many alternatives.
    """

    part: Read  # the part that is read next
    logits: Tensor  # (1, V), of the token after the last one read

    def __init__(
        self, forward: Forward, samples: "Iterable[Sample]", tokens: Sequence[int], scored: int | None = None
    ) -> None:
        self.forward, self.tokens, self.scored = forward, tokens, scored
        self.samples = deque(samples)  # that wait for it
        self.context = forward.config.context_length
        # The first token of the window, and the next one to read.
        self.start = self.read = window_start(len(tokens), self.context) if scored is None else 0
        self.store = new_store(forward.config, 0, forward.weight)  # (layers, 2, H, T, K) of the window
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
        cached = self.forward.cached
        if self.read == self.start or not cached:  # only now: those that wait should take no memory
            self.read, columns = self.start, last - self.start if cached else 0
            self.store = new_store(self.forward.config, columns, self.forward.weight)
        end = min(self.read + self.forward.chunk, last) if cached else last
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
