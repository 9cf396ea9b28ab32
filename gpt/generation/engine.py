"""The decoding engine: one batch that samples join and leave at any step (Yu et al. 2022, Orca, section 3.2).

A prompt is read once for all of its samples. From then on every step reads each weight once and adds a token
to every running sample.

The window. A model sees at most `context_length` tokens. When a text grows past that, its window moves
forward by half a context: the oldest half is dropped and the rest is read again at positions from 0, because
positions are learned for places in the window. So the model always sees between half a context and a whole
one, and a token costs at most about twice as much as before. `window_start` is the rule.

Shapes: N running samples, V vocab_size.
"""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gpt.errors import InputError
from gpt.generation.cache import RowCache
from gpt.generation.compiled import CompiledStep
from gpt.generation.prefill import UNSCORED, Forward, Prefill, Score, scores, window_start
from gpt.generation.sampling import Sampling, sample_tokens
from gpt.generation.text import TextStream
from gpt.model import GPT
from gpt.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt and how to continue it; InputError for an empty prompt or a number out of its range."""

    tokens: Sequence[int]  # the prompt
    max_new_tokens: int  # each sample ends after this many tokens at the latest
    sampling: Sampling = field(default_factory=Sampling)  # how tokens are drawn
    seed: int | None = None  # sample k's random numbers depend on it and on k alone; None takes a random one
    samples: int = 1  # how many texts to write; the prompt is read once for all
    first_sample: int = 0  # the k of the first one
    end: int | None = None  # a sample ends after this token
    stop: Sequence[str] = ()  # a text ends before these strings; for an engine with a tokenizer
    alternatives: int | None = None  # return log-probabilities of each token and of this many likeliest ones
    echo: bool = False  # return the tokens of the prompt before the new ones

    def __post_init__(self) -> None:
        if not len(self.tokens):
            raise InputError("expected a prompt of at least one token")
        for name, least in (("max_new_tokens", 0), ("samples", 1), ("alternatives", 0)):
            if (value := getattr(self, name)) is not None and value < least:
                raise InputError(f"{name} must be at least {least}, got {value}")


@dataclass(eq=False)
class Sample:
    """One text that is being written."""

    request: Request
    k: int  # which sample of the request's prompt it is
    tokens: list[int]  # the prompt, then the new tokens
    random: random.Random
    text: TextStream | None  # None without a tokenizer
    finished: str | None = None  # `stop`, `length`, `cancelled` or `error`; None while it runs
    start: int = 0  # the first token in the window

    @property
    def new_tokens(self) -> int:
        """How many tokens were added."""
        return len(self.tokens) - len(self.request.tokens)


@dataclass(frozen=True)
class Token:
    """A token that a step adds to a sample."""

    sample: Sample
    id: int
    text: str  # what is known of the sample's text from this token on, often none; "" without a tokenizer
    log_probability: float | None  # before penalties, temperature and filters, in nats; None if not requested
    alternatives: tuple[tuple[int, float], ...]  # the likeliest ids in its place with theirs, likeliest first
    finished: str | None  # why the sample ended, if this is its last token
    echoed: bool  # whether it is a token of the prompt


class Engine:
    """Decodes requests together. Not thread-safe.

    Results do not depend on what else is decoded: on a CPU, with a model from `for_decoding` whose context
    length is a multiple of 64 or below 64, they are equal bit for bit. An error in one sample ends only that
    sample: see `failed`.

    A model whose own `forward` takes no `caches`, or does not fill them, reads a whole window for each token.
    A size below one, or a vocabulary larger than the model's, raises InputError.

    Args:
        model: in evaluation mode, best from `for_decoding`.
        tokenizer: also write text; without it there are ids only.
        max_samples: how many samples run at a time; more wait.
        chunk: a prompt is read in chunks of this many tokens, and running samples get a token in between.
        vocab_size: ids from here on are never drawn; the tokenizer's by default.
    """

    def __init__(
        self,
        model: GPT,
        tokenizer: Tokenizer | None = None,
        *,
        max_samples: int = 64,
        chunk: int = 512,
        vocab_size: int | None = None,
    ) -> None:
        if min(max_samples, chunk) < 1:
            raise InputError(f"max_samples and chunk must be at least 1, got {max_samples} and {chunk}")
        self.model, self.tokenizer, self.max_samples, self.chunk = model, tokenizer, max_samples, chunk
        most = model.config.vocab_size
        default = min(most, tokenizer.n_vocab) if tokenizer else most
        self.vocab_size = default if vocab_size is None else vocab_size
        if not 1 <= self.vocab_size <= most:
            raise InputError(f"vocab_size must be 1 to {most}, got {vocab_size}")
        self.failed: dict[Sample, Exception] = {}  # those that ended with an error in the last step
        self._waiting: deque[tuple[deque[Sample], Prefill]] = deque()  # samples that share a prompt
        self._running: list[Sample] = []  # sample i has row i of the cache
        self._forward = Forward(model)
        self._cache = RowCache(model.config, self._forward.device, self._forward.dtype)
        self._compiled = CompiledStep.of(model)
        self._program: CompiledStep | None = None  # that computes all texts of now, so that none changes over

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

        InputError for a token id outside the vocabulary, or an empty stop string.
        """
        biased = [id_ for id_, _ in request.sampling.logit_bias]
        for ids, vocab_size in ((request.tokens, self.model.config.vocab_size), (biased, self.vocab_size)):
            for id_ in ids:
                if not 0 <= id_ < vocab_size:
                    raise InputError(f"token id {id_} is outside the vocabulary of vocab_size {vocab_size}")
        seed = random.SystemRandom().getrandbits(64) if request.seed is None else request.seed
        samples = []
        for k in range(request.first_sample, request.first_sample + request.samples):
            text = TextStream(self.tokenizer, request.stop) if self.tokenizer else None
            samples.append(Sample(request, k, list(request.tokens), random.Random(f"{seed}/{k}"), text))
        if request.max_new_tokens == 0 and not request.echo:
            for sample in samples:
                sample.finished = "length"
        else:
            if not self.busy:
                self._program = self._compiled if self._compiled and self._compiled.ready else None
            scored = request.alternatives if request.echo else None
            self._waiting.append((deque(samples), Prefill(self._forward, request.tokens, self.chunk, scored)))
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
        for samples, _ in self._waiting:
            if sample in samples:
                samples.remove(sample)
        self._waiting = deque(waiting for waiting in self._waiting if waiting[0])

    @torch.inference_mode()
    def step(self) -> list[Token]:
        """Add a token to every running sample, then start waiting ones while there are free rows."""
        self.failed = {}
        return self._decode() + self._admit()

    def _decode(self) -> list[Token]:
        for sample in list(self._running):
            start = window_start(len(sample.tokens), self.model.config.context_length)
            if start > sample.start:
                sample.start = start
                if self._forward.cached:
                    self._read_window(sample)
        if not self._running:
            return []
        if self._program:
            reads = self._cache.append([sample.tokens[-1] for sample in self._running])
            logits = self._program(reads)
        elif not self._forward.cached:
            windows = [sample.tokens[sample.start :] for sample in self._running]
            logits = torch.cat([self._forward([window])[:, -1] for window in windows])  # (N, V)
        else:
            caches, positions, masked = self._cache.next_step()
            newest = [[sample.tokens[-1]] for sample in self._running]
            logits = self._forward(newest, positions=positions, key_padding_mask=masked, caches=caches)[:, -1]
        return self._draw(self._running, logits)

    def _read_window(self, sample: Sample) -> None:
        """Read a window that has moved, but for its newest token, which `_decode` reads."""
        prefill = Prefill(self._forward, sample.tokens[sample.start : -1], self.chunk)
        while prefill.next:
            if error := self._read([prefill]).get(prefill):
                return self._fail(sample, error)
        self._cache.fill(self._running.index(sample), prefill.store)

    def _read(self, prompts: Sequence[Prefill]) -> dict[Prefill, Exception]:
        """Read the next part of each prompt, with the compiled program all at once; return what failed."""
        failed: dict[Prefill, Exception] = {}
        read = (self._program or self._forward).read
        for some in [prompts] if self._program else [[prompt] for prompt in prompts]:
            try:
                for prompt, logits in zip(some, read([one.next for one in some if one.next]), strict=True):
                    prompt.take(logits)
            except Exception as error:
                failed |= dict.fromkeys(some, error)
        return failed

    def _admit(self) -> list[Token]:
        """Read at most about a chunk of the waiting prompts and start their samples."""
        tokens: list[Token] = []
        budget = self.chunk
        while self._waiting and budget > 0 and len(self._running) < self.max_samples:
            waiting: list[tuple[deque[Sample], Prefill]] = []
            prompts: list[Prefill] = []
            rows = len(self._running)
            while self._waiting and budget > 0 and rows < self.max_samples:
                samples, prefill = self._waiting.popleft()
                waiting.append((samples, prefill))
                rows += len(samples)
                if prefill.next:
                    prompts.append(prefill)
                    budget -= len(prefill.next.tokens)
            failed = self._read(prompts)
            for samples, prefill in waiting:
                if error := failed.get(prefill):
                    while samples:
                        self._fail(samples.popleft(), error)
                elif prefill.next is None:
                    tokens += self._start(samples, prefill)
            self._waiting.extendleft(one for one in waiting[::-1] if one[0])
        return tokens

    def _start(self, samples: deque[Sample], prefill: Prefill) -> list[Token]:
        """Take those samples of a prompt for which there are free rows, and draw their first tokens."""
        free = self.max_samples - len(self._running)
        started = [samples.popleft() for _ in range(min(free, len(samples)))]
        tokens: list[Token] = []
        if started and started[0].request.echo:
            tokens += [token for sample in started for token in self._echo(sample, prefill.scores)]
        if not started or started[0].request.max_new_tokens == 0:
            return tokens
        for sample in started:
            sample.start = prefill.start
            self._running.append(sample)
            self._cache.fill(self._cache.join(), prefill.store)
        return tokens + self._draw(started, prefill.logits.expand(len(started), -1))

    def _echo(self, sample: Sample, scored: Sequence[Score]) -> list[Token]:
        """The tokens of the prompt; they end a sample that has no new ones."""
        *others, last = zip(sample.tokens, scored, strict=True)
        tokens = [self._token(sample, id_, score, echoed=True) for id_, score in others]
        if sample.request.max_new_tokens == 0:
            sample.finished = "length"
        return [*tokens, self._token(sample, *last, echoed=True)]

    def _draw(self, samples: Sequence[Sample], logits: Tensor) -> list[Token]:
        """Draw a token for each sample from its logits (N, V), and end the samples that are complete."""
        logits = logits[:, : self.vocab_size].float()
        samples = list(samples)
        numbers = [sample.random.random() for sample in samples]
        groups: dict[Sampling, list[int]] = {}
        for row, sample in enumerate(samples):
            groups.setdefault(sample.request.sampling, []).append(row)
        left, ids = list(groups.values()), dict[int, int]()
        while left:
            rows = left.pop()
            try:
                drawn = sample_tokens(
                    logits if len(rows) == len(samples) else logits[rows],
                    samples[rows[0]].request.sampling,
                    seen=[samples[row].tokens for row in rows],
                    numbers=[numbers[row] for row in rows],
                    prompt_lengths=[len(samples[row].request.tokens) for row in rows],
                )
                ids.update(zip(rows, drawn.tolist(), strict=True))
            except Exception as error:
                if len(rows) > 1:  # at least one of them fails: draw each alone
                    left += [[row] for row in rows]
                else:
                    self._fail(samples[rows[0]], error)
        tokens = []
        for row, id_ in sorted(ids.items()):
            sample = samples[row]
            sample.tokens.append(id_)
            if id_ == sample.request.end:
                sample.finished = "stop"
            elif sample.new_tokens == sample.request.max_new_tokens:
                sample.finished = "length"
            wanted = sample.request.alternatives
            score = UNSCORED if wanted is None else scores(logits[row : row + 1], [id_], wanted)[0]
            tokens.append(self._token(sample, id_, score))
            if sample.finished:
                self._remove(sample)
        return tokens

    def _token(self, sample: Sample, id_: int, score: Score, *, echoed: bool = False) -> Token:
        """The token with its text, in which a stop string may end the sample."""
        text = ""
        if sample.text:
            text = sample.text.feed(id_, echoed=echoed)
            if sample.text.stopped:
                sample.finished = "stop"
            if sample.finished:
                text += sample.text.close()
        return Token(sample, id_, text, *score, finished=sample.finished, echoed=echoed)

    def _fail(self, sample: Sample, error: Exception) -> None:
        """End a sample with an error."""
        sample.finished = "error"
        self.failed[sample] = error
        if sample in self._running:
            self._remove(sample)

    def _remove(self, sample: Sample) -> None:
        """Free the sample's row; as in `RowCache.leave`, the last row takes its number."""
        row = self._running.index(sample)
        self._cache.leave(row)
        last = self._running.pop()
        if last is not sample:
            self._running[row] = last
