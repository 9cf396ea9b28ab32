"""The decoding engine: one batch that texts join and leave at any step (Yu et al. 2022, Orca, section 3.2).

A prompt is read once, whatever the number of its samples; from then on every step reads each weight once and
gives every running sample its next token.

The window. A model looks at no more than `context_length` tokens. When a text grows past that, its window
moves forward by half a context: the oldest half is forgotten and the rest is read again at positions from 0,
since a learned position belongs to its token's place in the window. So between half a context and a whole one
is always seen, and a token costs at most about twice what it costs before. `window_start` is the rule.

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
from gpt.generation.sampling import Sampling, choose
from gpt.model import GPT


def window_start(length: int, context_length: int) -> int:
    """The first token of a text of `length` tokens that the model sees when it predicts the next."""
    shift = max(1, context_length // 2)
    return max(0, -(-(length - context_length) // shift) * shift)


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked of the engine: some samples of what follows a prompt.

    Raises:
        InputError: an empty prompt, or a number out of its range.
    """

    tokens: Sequence[int]
    """The prompt."""
    max_new_tokens: int
    """Each sample ends after so many tokens at the latest."""
    sampling: Sampling = field(default_factory=Sampling)
    """How tokens are drawn."""
    seed: int | None = None
    """Sample k draws from random numbers that depend on `seed` and k alone; None takes fresh ones."""
    samples: int = 1
    """How many texts to write. They share the reading of the prompt."""
    first_sample: int = 0
    """The k of the first one."""
    end: int | None = None
    """A sample ends with this token, if it comes."""
    alternatives: int | None = None
    """Give log-probabilities: of each new token, and of so many likeliest in its place; None gives none."""

    def __post_init__(self) -> None:
        if not len(self.tokens):
            raise InputError("expected a prompt of at least one token")
        if self.max_new_tokens < 0:
            raise InputError(f"max_new_tokens must be at least 0, got {self.max_new_tokens}")
        if self.samples < 1:
            raise InputError(f"samples must be at least 1, got {self.samples}")
        if self.alternatives is not None and self.alternatives < 0:
            raise InputError(f"alternatives must be at least 0, got {self.alternatives}")


@dataclass(eq=False, kw_only=True)
class Sample:
    """One text in the making."""

    request: Request
    k: int
    """Which sample of the request's prompt it is."""
    tokens: list[int]
    """The prompt, then what was written."""
    random: random.Random
    finished: str | None = None
    """`stop` after the end token, `length` after the most tokens, `cancelled`; None while it runs."""
    start: int = 0
    """The first token in the window."""

    @property
    def new_tokens(self) -> int:
        """How many tokens were written."""
        return len(self.tokens) - len(self.request.tokens)


@dataclass(frozen=True, kw_only=True)
class Token:
    """A token that a step gave to a sample.

    Log-probabilities are the model's own, in nats, before penalty, temperature and filters.
    """

    sample: Sample
    id: int
    log_probability: float | None = None
    alternatives: tuple[tuple[int, float], ...] = ()
    """The likeliest ids in its place with their log-probabilities, likeliest first."""


@dataclass(eq=False, kw_only=True)
class _Prompt:
    """A request that waits, is being read, or waits for room for the rest of its samples."""

    samples: deque[Sample]
    reading: "_Reading | None" = None


class Engine:
    """Decodes requests together. Not for several threads at once.

    Results do not depend on what else is decoded: on a CPU with a model from `for_decoding`, whose context
    length is a multiple of 64 or below, they are equal bit for bit.

    Args:
        model: in evaluation mode, best from `for_decoding`.
        max_samples: the most samples that run at a time; more wait.
        chunk: a prompt is read in pieces of so many tokens, and running samples get a token between them.
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
        self._waiting: deque[_Prompt] = deque()
        self._running: list[Sample] = []  # sample i has row i of the cache
        self._cache = RowCache(model.config, embedding.device, embedding.dtype)

    @property
    def busy(self) -> bool:
        """Whether another step would do anything."""
        return bool(self._waiting or self._running)

    @property
    def running(self) -> int:
        """How many samples decode now."""
        return len(self._running)

    def add(self, request: Request) -> list[Sample]:
        """Take in a request; its samples get their tokens from the next steps on."""
        seed = random.SystemRandom().getrandbits(64) if request.seed is None else request.seed
        samples = [
            Sample(request=request, k=k, tokens=list(request.tokens), random=random.Random(f"{seed}/{k}"))
            for k in range(request.first_sample, request.first_sample + request.samples)
        ]
        if request.max_new_tokens == 0:
            for sample in samples:
                sample.finished = "length"
        else:
            self._waiting.append(_Prompt(samples=deque(samples)))
        return samples

    @torch.inference_mode()
    def cancel(self, sample: Sample) -> None:
        """End a sample now; nothing happens if it has ended."""
        if sample.finished is not None:
            return
        sample.finished = "cancelled"
        if sample in self._running:
            self._leave(sample)
            return
        for prompt in self._waiting:
            if sample in prompt.samples:
                prompt.samples.remove(sample)
        self._waiting = deque(prompt for prompt in self._waiting if prompt.samples)

    @torch.inference_mode()
    def step(self) -> list[Token]:
        """Give every running sample its next token, and let waiting ones begin as far as there is room."""
        tokens = self._decode() if self._running else []
        return tokens + self._admit()

    def _decode(self) -> list[Token]:
        for row, sample in enumerate(self._running):
            start = window_start(len(sample.tokens), self.model.config.context_length)
            if start > sample.start:  # the newest token is read below, with everybody else's
                sample.start = start
                reading = _Reading(self, sample.tokens[start:-1])
                while not reading.done:
                    reading.go_on()
                self._cache.fill(row, reading.caches)
        caches, positions, hidden = self._cache.one_more()
        newest = torch.tensor([[sample.tokens[-1]] for sample in self._running], device=self.device)  # (N, 1)
        features = self.model.features(newest, positions=positions, key_padding_mask=hidden, caches=caches)
        return self._give(self._running, self.model.head(features[:, -1]))

    def _admit(self) -> list[Token]:
        """Read what waits, at most about a chunk of it, and start its samples."""
        given: list[Token] = []
        budget = self.chunk
        while self._waiting and budget > 0 and len(self._running) < self.max_samples:
            prompt = self._waiting[0]
            if prompt.reading is None:
                tokens = prompt.samples[0].tokens
                prompt.reading = _Reading(
                    self, tokens[window_start(len(tokens), self.model.config.context_length) :]
                )
            if not prompt.reading.done:
                budget -= prompt.reading.go_on()
                continue
            free = min(self.max_samples - len(self._running), len(prompt.samples))
            started = [prompt.samples.popleft() for _ in range(free)]
            for sample in started:
                sample.start = window_start(len(sample.tokens), self.model.config.context_length)
                self._running.append(sample)
                self._cache.fill(self._cache.join(), prompt.reading.caches)
            if not prompt.samples:
                self._waiting.popleft()
            given += self._give(started, prompt.reading.logits.expand(len(started), -1))
        return given

    def _give(self, samples: Sequence[Sample], logits: Tensor) -> list[Token]:
        """Draw a token for each sample from its logits (N, V), and end those that are done."""
        logits = logits[:, : self.vocab_size].float()
        samples = list(samples)
        alike: dict[Sampling, list[int]] = {}
        for row, sample in enumerate(samples):
            alike.setdefault(sample.request.sampling, []).append(row)
        ids = [0] * len(samples)
        for sampling, rows in alike.items():
            drawn = choose(
                logits if len(alike) == 1 else logits[rows],
                sampling,
                seen=[samples[row].tokens for row in rows],
                numbers=[samples[row].random.random() for row in rows],
            )
            for row, token in zip(rows, drawn.tolist(), strict=True):
                ids[row] = token
        given = [_token(sample, id_, row) for sample, id_, row in zip(samples, ids, logits, strict=True)]
        for token in given:
            sample = token.sample
            sample.tokens.append(token.id)
            if token.id == sample.request.end:
                sample.finished = "stop"
            elif sample.new_tokens == sample.request.max_new_tokens:
                sample.finished = "length"
            if sample.finished:
                self._leave(sample)
        return given

    def _leave(self, sample: Sample) -> None:
        """The row goes as in `RowCache.leave`: the last one takes its number."""
        row = self._running.index(sample)
        self._cache.leave(row)
        last = self._running.pop()
        if last is not sample:
            self._running[row] = last


class _Reading:
    """Reads tokens into caches chunk by chunk; `logits` (1, V) are those of the token that follows."""

    def __init__(self, engine: Engine, tokens: Sequence[int]) -> None:
        self.model, self.chunk, self.tokens = engine.model, engine.chunk, tokens
        config, weight = engine.model.config, engine.model.token_embedding.weight
        shape = (1, config.num_heads, max(1, len(tokens)), config.emb_dim // config.num_heads)
        self.caches = [
            KeyValueCache(*shape, device=weight.device, dtype=weight.dtype) for _ in range(config.num_layers)
        ]
        self.logits = torch.empty(0)

    @property
    def done(self) -> bool:
        """Whether all tokens were read."""
        return self.caches[0].length == len(self.tokens)

    def go_on(self) -> int:
        """Read a chunk, and return how many tokens it had."""
        first = self.caches[0].length
        chunk = torch.tensor(
            [self.tokens[first : first + self.chunk]], device=self.caches[0].keys.device
        )  # (1, T)
        features = self.model.features(chunk, caches=self.caches)  # (1, T, D)
        if self.done:
            self.logits = self.model.head(features[:, -1])  # (1, V)
        return chunk.shape[1]


def _token(sample: Sample, id_: int, logits: Tensor) -> Token:
    """The token with its log-probabilities, if they were asked for; logits (V,)."""
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
