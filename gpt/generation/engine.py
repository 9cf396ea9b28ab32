"""The decoding engine: one batch that samples join and leave at any step (Yu et al. 2022, Orca, section 3.2).

A prompt is read once for all of its samples. From then on every step reads each weight once and adds a token
to every running sample.

The window. A model sees at most `context_length` tokens. When a text grows past that, its window moves
forward by half a context: the oldest half is dropped and the rest is read again at positions from 0, because
positions are learned for places in the window. So the model always sees between half a context and a whole
one, and a token costs at most about twice as much as before. `window_start` is the rule.

Shapes: N running samples, T tokens of a chunk, V vocab_size.
"""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gpt.attention import KeyValueCache
from gpt.errors import InputError
from gpt.generation.cache import RowCache
from gpt.generation.sampling import Sampling, sample_tokens
from gpt.model import GPT


def window_start(length: int, context_length: int) -> int:
    """The first token that the model sees when it predicts the one after a text of `length` tokens."""
    shift = max(1, context_length // 2)
    return max(0, -(-(length - context_length) // shift) * shift)


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt and how to continue it.

    Raises:
        InputError: an empty prompt, or a number out of its range.
    """

    tokens: Sequence[int]
    """The prompt."""
    max_new_tokens: int
    """Each sample ends after this many tokens at the latest."""
    sampling: Sampling = field(default_factory=Sampling)
    """How tokens are drawn."""
    seed: int | None = None
    """Sample k draws from random numbers that depend on `seed` and k alone; None takes a random seed."""
    samples: int = 1
    """How many texts to write. The prompt is read once for all."""
    first_sample: int = 0
    """The k of the first one."""
    end: int | None = None
    """A sample ends after this token."""
    alternatives: int | None = None
    """Return log-probabilities of each new token and of this many alternatives; None returns none."""

    def __post_init__(self) -> None:
        if not len(self.tokens):
            raise InputError("expected a prompt of at least one token")
        lowest = {"max_new_tokens": 0, "samples": 1, "alternatives": 0}
        for name, least in lowest.items():
            if (value := getattr(self, name)) is not None and value < least:
                raise InputError(f"{name} must be at least {least}, got {value}")


@dataclass(eq=False, kw_only=True)
class Sample:
    """One text that is being written."""

    request: Request
    k: int
    """Which sample of the request's prompt it is."""
    tokens: list[int]
    """The prompt, then the new tokens."""
    random: random.Random
    finished: str | None = None
    """`stop` after the end token, `length` after max_new_tokens, `cancelled`; None while it runs."""
    start: int = 0
    """The first token in the window."""

    @property
    def new_tokens(self) -> int:
        """How many tokens were added."""
        return len(self.tokens) - len(self.request.tokens)


@dataclass(frozen=True, kw_only=True)
class Token:
    """A token that a step adds to a sample.

    Log-probabilities are the model's own, in nats, before penalties, temperature and filters.
    """

    sample: Sample
    id: int
    log_probability: float | None = None
    alternatives: tuple[tuple[int, float], ...] = ()
    """The likeliest ids in its place with their log-probabilities, likeliest first."""


@dataclass(eq=False, kw_only=True)
class _Waiting:
    """A request that waits, is being read, or waits for free rows for the rest of its samples."""

    samples: deque[Sample]
    prefill: "Prefill | None" = None


class Engine:
    """Decodes requests together. Not thread-safe.

    Results do not depend on what else is decoded: on a CPU, with a model from `for_decoding` whose context
    length is a multiple of 64 or below 64, they are equal bit for bit.

    Args:
        model: in evaluation mode, best from `for_decoding`.
        max_samples: how many samples run at a time; more wait.
        chunk: a prompt is read in chunks of this many tokens, and running samples get a token in between.
        vocab_size: ids from here on are never drawn; for a model whose vocabulary is padded.

    Raises:
        InputError: a size below one, or a vocabulary larger than the model's.
    """

    def __init__(
        self, model: GPT, *, max_samples: int = 64, chunk: int = 512, vocab_size: int | None = None
    ) -> None:
        if min(max_samples, chunk) < 1:
            raise InputError(f"max_samples and chunk must be at least 1, got {max_samples} and {chunk}")
        self.model, self.max_samples, self.chunk = model, max_samples, chunk
        self.vocab_size = model.config.vocab_size if vocab_size is None else vocab_size
        if not 1 <= self.vocab_size <= model.config.vocab_size:
            raise InputError(f"vocab_size must be 1 to {model.config.vocab_size}, got {vocab_size}")
        embedding = model.token_embedding.weight
        self.device = embedding.device
        self._waiting: deque[_Waiting] = deque()
        self._running: list[Sample] = []  # sample i has row i of the cache
        self._cache = RowCache(model.config, embedding.device, embedding.dtype)

    @property
    def busy(self) -> bool:
        """Whether there is work for another step."""
        return bool(self._waiting or self._running)

    @property
    def running(self) -> int:
        """How many samples are decoded now."""
        return len(self._running)

    def add(self, request: Request) -> list[Sample]:
        """Add a request; its samples get their tokens from the next steps."""
        seed = random.SystemRandom().getrandbits(64) if request.seed is None else request.seed
        samples = [
            Sample(request=request, k=k, tokens=list(request.tokens), random=random.Random(f"{seed}/{k}"))
            for k in range(request.first_sample, request.first_sample + request.samples)
        ]
        if request.max_new_tokens == 0:
            for sample in samples:
                sample.finished = "length"
        else:
            self._waiting.append(_Waiting(samples=deque(samples)))
        return samples

    @torch.inference_mode()
    def cancel(self, sample: Sample) -> None:
        """End a sample now; nothing happens if it has ended."""
        if sample.finished is not None:
            return
        sample.finished = "cancelled"
        if sample in self._running:
            self._remove(sample)
            return
        for waiting in self._waiting:
            if sample in waiting.samples:
                waiting.samples.remove(sample)
        self._waiting = deque(waiting for waiting in self._waiting if waiting.samples)

    @torch.inference_mode()
    def step(self) -> list[Token]:
        """Add a token to every running sample, then start waiting ones while there are free rows."""
        tokens = self._decode() if self._running else []
        return tokens + self._admit()

    def _decode(self) -> list[Token]:
        for row, sample in enumerate(self._running):
            start = window_start(len(sample.tokens), self.model.config.context_length)
            if start > sample.start:  # the newest token is read below, with those of the other samples
                sample.start = start
                prefill = Prefill(self.model, sample.tokens[start:-1], self.chunk)
                while not prefill.done:
                    prefill.step()
                self._cache.fill(row, prefill.caches)
        caches, positions, masked = self._cache.next_step()
        newest = torch.tensor([[sample.tokens[-1]] for sample in self._running], device=self.device)  # (N, 1)
        features = self.model.features(newest, positions=positions, key_padding_mask=masked, caches=caches)
        return self._draw(self._running, self.model.head(features[:, -1]))

    def _admit(self) -> list[Token]:
        """Read at most about a chunk of the waiting prompts and start their samples."""
        tokens: list[Token] = []
        budget = self.chunk
        while self._waiting and budget > 0 and len(self._running) < self.max_samples:
            waiting = self._waiting[0]
            prompt = waiting.samples[0].tokens
            start = window_start(len(prompt), self.model.config.context_length)
            if waiting.prefill is None:
                waiting.prefill = Prefill(self.model, prompt[start:], self.chunk)
            if not waiting.prefill.done:
                budget -= waiting.prefill.step()
                continue
            free = min(self.max_samples - len(self._running), len(waiting.samples))
            started = [waiting.samples.popleft() for _ in range(free)]
            for sample in started:
                sample.start = start
                self._running.append(sample)
                self._cache.fill(self._cache.join(), waiting.prefill.caches)
            if not waiting.samples:
                self._waiting.popleft()
            tokens += self._draw(started, waiting.prefill.logits.expand(len(started), -1))
        return tokens

    def _draw(self, samples: Sequence[Sample], logits: Tensor) -> list[Token]:
        """Draw a token for each sample from its logits (N, V), and end the samples that are complete."""
        logits = logits[:, : self.vocab_size].float()
        samples = list(samples)
        groups: dict[Sampling, list[int]] = {}
        for row, sample in enumerate(samples):
            groups.setdefault(sample.request.sampling, []).append(row)
        ids = [0] * len(samples)
        for sampling, rows in groups.items():
            drawn = sample_tokens(
                logits if len(groups) == 1 else logits[rows],
                sampling,
                seen=[samples[row].tokens for row in rows],
                numbers=[samples[row].random.random() for row in rows],
            )
            for row, token in zip(rows, drawn.tolist(), strict=True):
                ids[row] = token
        tokens = [_token(sample, id_, row) for sample, id_, row in zip(samples, ids, logits, strict=True)]
        for sample, id_ in zip(samples, ids, strict=True):
            sample.tokens.append(id_)
            if id_ == sample.request.end:
                sample.finished = "stop"
            elif sample.new_tokens == sample.request.max_new_tokens:
                sample.finished = "length"
            if sample.finished:
                self._remove(sample)
        return tokens

    def _remove(self, sample: Sample) -> None:
        """Free the sample's row; as in `RowCache.leave`, the last row takes its number."""
        row = self._running.index(sample)
        self._cache.leave(row)
        last = self._running.pop()
        if last is not sample:
            self._running[row] = last


class Prefill:
    """Reads tokens into caches chunk by chunk.

    Args:
        model: the engine's.
        tokens: those of one window.
        chunk: how many to read in a step.
    """

    def __init__(self, model: GPT, tokens: Sequence[int], chunk: int) -> None:
        self.model, self.tokens, self.chunk = model, tokens, chunk
        config, weight = model.config, model.token_embedding.weight
        shape = (1, config.num_heads, max(1, len(tokens)), config.emb_dim // config.num_heads)
        self.caches = [
            KeyValueCache(*shape, device=weight.device, dtype=weight.dtype) for _ in range(config.num_layers)
        ]
        self.logits = torch.empty(0)
        """(1, V), of the token after the last; set when `done`."""

    @property
    def done(self) -> bool:
        """Whether all tokens are read."""
        return self.caches[0].length == len(self.tokens)

    def step(self) -> int:
        """Read a chunk and return how many tokens it has."""
        first, device = self.caches[0].length, self.caches[0].keys.device
        chunk = torch.tensor([self.tokens[first : first + self.chunk]], device=device)  # (1, T)
        features = self.model.features(chunk, caches=self.caches)  # (1, T, D)
        if self.done:
            self.logits = self.model.head(features[:, -1])  # (1, V)
        return chunk.shape[1]


def _token(sample: Sample, id_: int, logits: Tensor) -> Token:
    """The token, with its log-probabilities if the request wants them; logits (V,)."""
    count = sample.request.alternatives
    if count is None:
        return Token(sample=sample, id=id_)
    log_probabilities = logits.log_softmax(dim=-1)  # (V,)
    likeliest = log_probabilities.topk(min(count, len(logits)))
    return Token(
        sample=sample,
        id=id_,
        log_probability=float(log_probabilities[id_]),
        alternatives=tuple(zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True)),
    )
