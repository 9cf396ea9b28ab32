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
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gpt.errors import InputError
from gpt.generation.cache import RowCache
from gpt.generation.prefill import Forward, Prefill, Score, scores, window_start
from gpt.generation.sampling import Sampling, sample_tokens
from gpt.model import GPT


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
    echo: bool = False
    """Return the tokens of the prompt before the new ones."""

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
    """`stop` after the end token, `length` after max_new_tokens, `cancelled`, `error`; None while it runs."""
    error: Exception | None = None
    """Why it ended with `error`."""
    start: int = 0
    """The first token in the window."""

    @property
    def new_tokens(self) -> int:
        """How many tokens were added."""
        return len(self.tokens) - len(self.request.tokens)


@dataclass(frozen=True, kw_only=True)
class Token:
    """A token that a step adds to a sample."""

    sample: Sample
    id: int
    score: Score = Score()  # noqa: RUF009 - frozen
    finished: str | None = None
    """Why the sample ended, if this is its last token."""
    echoed: bool = False
    """Whether it is a token of the prompt."""

    @property
    def log_probability(self) -> float | None:
        """The model's own, in nats, before penalties, temperature and filters; None if not requested."""
        return self.score.log_probability

    @property
    def alternatives(self) -> tuple[tuple[int, float], ...]:
        """The likeliest ids in its place with their log-probabilities, likeliest first."""
        return self.score.alternatives


@dataclass(eq=False, kw_only=True)
class _Waiting:
    """A request that waits, is being read, or waits for free rows for the rest of its samples."""

    samples: deque[Sample]
    prefill: "Prefill | None" = None


class Engine:
    """Decodes requests together. Not thread-safe.

    Results do not depend on what else is decoded: on a CPU, with a model from `for_decoding` whose context
    length is a multiple of 64 or below 64, they are equal bit for bit. An error in one sample ends only that
    sample: see `take_failed`.

    A model whose own `forward` takes no `caches`, or does not fill them, is called with the whole window for
    every token.

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
        self._waiting: deque[_Waiting] = deque()
        self._running: list[Sample] = []  # sample i has row i of the cache
        self._failed: list[Sample] = []
        self._forward = Forward(model)
        self._cache = RowCache(model.config, self._forward.device, self._forward.dtype)

    @property
    def busy(self) -> bool:
        """Whether there is work for another step."""
        return bool(self._waiting or self._running)

    @property
    def running(self) -> int:
        """How many samples are decoded now."""
        return len(self._running)

    def add(self, request: Request) -> list[Sample]:
        """Add a request; its samples get their tokens from the next steps.

        Raises:
            InputError: a token id outside the vocabulary.
        """
        for ids, vocab_size in (
            (request.tokens, self.model.config.vocab_size),
            ([id_ for id_, _ in request.sampling.logit_bias], self.vocab_size),
        ):
            for id_ in ids:
                if not 0 <= id_ < vocab_size:
                    raise InputError(f"token id {id_} is outside the vocabulary of vocab_size {vocab_size}")
        seed = random.SystemRandom().getrandbits(64) if request.seed is None else request.seed
        samples = [
            Sample(request=request, k=k, tokens=list(request.tokens), random=random.Random(f"{seed}/{k}"))
            for k in range(request.first_sample, request.first_sample + request.samples)
        ]
        if request.max_new_tokens == 0 and not request.echo:
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

    def take_failed(self) -> list[Sample]:
        """The samples that ended with an error since the last call; each has its `error`."""
        failed, self._failed = self._failed, []
        return failed

    def _decode(self) -> list[Token]:
        for sample in list(self._running):
            start = window_start(len(sample.tokens), self.model.config.context_length)
            if start > sample.start:  # the newest token is read below, with those of the other samples
                sample.start = start
                if not self._forward.cached:
                    continue
                try:
                    prefill = Prefill(self._forward, sample.tokens[start:-1], self.chunk)
                    while not prefill.done:
                        prefill.step()
                except Exception as error:
                    self._fail(sample, error)
                else:
                    self._cache.fill(self._running.index(sample), prefill.caches)
        if not self._running:
            return []
        if not self._forward.cached:
            windows = [sample.tokens[sample.start :] for sample in self._running]
            logits = torch.cat([self._forward([window])[:, -1] for window in windows])  # (N, V)
        else:
            caches, positions, masked = self._cache.next_step()
            newest = [[sample.tokens[-1]] for sample in self._running]
            logits = self._forward(newest, positions=positions, key_padding_mask=masked, caches=caches)[:, -1]
        return self._draw(self._running, logits)

    def _admit(self) -> list[Token]:
        """Read at most about a chunk of the waiting prompts and start their samples."""
        tokens: list[Token] = []
        budget = self.chunk
        while self._waiting and budget > 0 and len(self._running) < self.max_samples:
            waiting = self._waiting[0]
            request = waiting.samples[0].request
            try:
                if waiting.prefill is None:
                    scored = request.alternatives if request.echo else None
                    waiting.prefill = Prefill(self._forward, request.tokens, self.chunk, scored)
                if not waiting.prefill.done:
                    budget -= waiting.prefill.step()
                    continue
            except Exception as error:
                self._waiting.popleft()
                for sample in waiting.samples:
                    self._fail(sample, error)
                continue
            free = min(self.max_samples - len(self._running), len(waiting.samples))
            started = [waiting.samples.popleft() for _ in range(free)]
            if not waiting.samples:
                self._waiting.popleft()
            if request.echo:
                tokens += [token for sample in started for token in self._echo(sample, waiting.prefill)]
            if request.max_new_tokens == 0:
                continue
            for sample in started:
                sample.start = waiting.prefill.start
                self._running.append(sample)
                self._cache.fill(self._cache.join(), waiting.prefill.caches)
            tokens += self._draw(started, waiting.prefill.logits.expand(len(started), -1))
        return tokens

    def _echo(self, sample: Sample, prefill: "Prefill") -> list[Token]:
        """The tokens of the prompt; they end a sample that has no new ones."""
        if sample.request.max_new_tokens == 0:
            sample.finished = "length"
        given = prefill.scores or [Score()] * len(sample.tokens)
        tokens = [
            Token(sample=sample, id=id_, score=score, echoed=True)
            for id_, score in zip(sample.tokens, given, strict=True)
        ]
        tokens[-1] = replace(tokens[-1], finished=sample.finished)
        return tokens

    def _draw(self, samples: Sequence[Sample], logits: Tensor) -> list[Token]:
        """Draw a token for each sample from its logits (N, V), and end the samples that are complete."""
        logits = logits[:, : self.vocab_size].float()
        samples = list(samples)
        numbers = [sample.random.random() for sample in samples]
        groups: dict[Sampling, list[int]] = {}
        for row, sample in enumerate(samples):
            groups.setdefault(sample.request.sampling, []).append(row)
        ids: dict[int, int] = {}

        def draw(rows: list[int]) -> None:
            drawn = sample_tokens(
                logits if len(rows) == len(samples) else logits[rows],
                samples[rows[0]].request.sampling,
                seen=[samples[row].tokens for row in rows],
                numbers=[numbers[row] for row in rows],
                prompt_lengths=[len(samples[row].request.tokens) for row in rows],
            )
            ids.update(zip(rows, drawn.tolist(), strict=True))

        for rows in groups.values():
            try:
                draw(rows)
            except Exception:  # at least one row fails: draw each alone, and end those that fail
                for row in rows:
                    try:
                        draw([row])
                    except Exception as error:
                        self._fail(samples[row], error)
        tokens = []
        for row in sorted(ids):
            sample, id_ = samples[row], ids[row]
            sample.tokens.append(id_)
            if id_ == sample.request.end:
                sample.finished = "stop"
            elif sample.new_tokens == sample.request.max_new_tokens:
                sample.finished = "length"
            wanted = sample.request.alternatives
            score = Score() if wanted is None else scores(logits[row : row + 1], [id_], wanted)[0]
            tokens.append(Token(sample=sample, id=id_, score=score, finished=sample.finished))
            if sample.finished:
                self._remove(sample)
        return tokens

    def _fail(self, sample: Sample, error: Exception) -> None:
        """End a sample with an error."""
        sample.finished, sample.error = "error", error
        self._failed.append(sample)
        if sample in self._running:
            self._remove(sample)

    def _remove(self, sample: Sample) -> None:
        """Free the sample's row; as in `RowCache.leave`, the last row takes its number."""
        row = self._running.index(sample)
        self._cache.leave(row)
        last = self._running.pop()
        if last is not sample:
            self._running[row] = last
