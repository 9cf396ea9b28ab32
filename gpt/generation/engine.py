"""The decoding engine: one batch that samples join and leave at any step (Yu et al. 2022, Orca, section 3.2).

A prompt is read once for all of its samples. From then on every step adds a token to every running sample,
on a GPU several.
When a text grows past `context_length`, its window moves forward by half a context: the rest is read again at
positions from 0, because positions are learned for places in the window. So the model always sees between
half a context and a whole one, and a token costs at most about twice as much. `window_start` is the rule.

Shapes: N running samples, V vocab_size.
"""

import math
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gpt.errors import InputError, check_least
from gpt.generation.cache import RowCache
from gpt.generation.decoding import Way, decoder_of
from gpt.generation.forward import to_device
from gpt.generation.prefill import UNSCORED, Prefill, Score, scores
from gpt.generation.sampling import Sampling, sample_tokens
from gpt.generation.text import TextStream
from gpt.model import GPT
from gpt.text.tokenizer import Tokenizer

_AHEAD = 8  # tokens that a GPU computes before the host waits for them, to end texts and to write them
_NOT_FINITE = "the model's logits are not finite: its weights are damaged, use an earlier checkpoint"


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt and how to continue it; InputError for an empty prompt or a number out of its range."""

    tokens: Sequence[int]  # the prompt
    max_new_tokens: int  # each sample ends after this many tokens at the latest
    sampling: Sampling = field(default_factory=Sampling)  # how tokens are drawn
    seed: int | None = None  # sample k's random numbers depend on it and on k alone; None takes a random one
    samples: int = 1  # how many texts to write; the prompt is read once for all
    end: int | None = None  # a sample ends after this token
    stop: Sequence[str] = ()  # a text ends before these strings; for an engine with a tokenizer
    alternatives: int | None = None  # return log-probabilities of each token and of this many likeliest ones
    echo: bool = False  # return the tokens of the prompt before the new ones

    def __post_init__(self) -> None:
        if not len(self.tokens):
            raise InputError("expected a prompt of at least one token")
        check_least(0, max_new_tokens=self.max_new_tokens, alternatives=self.alternatives)
        check_least(1, samples=self.samples)


@dataclass(eq=False)
class Sample:
    """One text that is being written."""

    request: Request
    k: int  # which sample of the request's prompt it is
    tokens: list[int]  # the prompt, then the new tokens
    random: random.Random
    text: TextStream | None  # None without a tokenizer
    finished: str | None = None  # `stop`, `length`, `cancelled` or `error`; None while it runs

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

    Results do not depend on what else is decoded: where the compiled program computes they are equal bit for
    bit, where PyTorch does logits are close. An error in one sample ends only that sample: see `failed`.

    Args:
        model: any GPT; it computes in evaluation mode and is left unchanged.
        tokenizer: also write text; without it there are ids only. No ids beyond its own are drawn.
        max_samples: how many samples run at a time; more wait.
        chunk: a prompt is read in chunks of this many tokens, and running samples go on in between.
        graphs: on a GPU, decode by CUDA graphs.
    """

    def __init__(
        self,
        model: GPT,
        tokenizer: Tokenizer | None = None,
        *,
        max_samples: int = 64,
        chunk: int = 512,
        graphs: bool = True,
    ) -> None:
        model = getattr(
            model, "_orig_mod", model
        )  # torch.compile's wrapper computes what the model in it does
        self.model, self.tokenizer, self.max_samples = model, tokenizer, max_samples
        most = model.config.vocab_size
        self.vocab_size = min(most, tokenizer.n_vocab) if tokenizer else most  # of the ids that are drawn
        self.failed: dict[Sample, Exception] = {}  # those that ended with an error in the last step
        self._waiting: deque[Prefill] = deque()
        self._running: list[Sample] = []  # sample i has row i of the cache
        self._chunk, self._graphs, self._decoder = chunk, graphs, decoder_of(model)
        # What computes all texts of now, so that none changes over, and into which memory.
        self._way: Way
        self._cache: RowCache
        self._device = next(model.parameters()).device
        self._ahead = _AHEAD if self._device.type == "cuda" else 1

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

        InputError for what is no token id of the vocabulary, or an empty stop string.
        """
        biased = [id_ for id_, _ in request.sampling.logit_bias]
        for ids, size in ((request.tokens, self.model.config.vocab_size), (biased, self.vocab_size)):
            if outside := [id_ for id_ in ids if not (hasattr(id_, "__index__") and 0 <= id_ < size)]:
                raise InputError(f"token id {outside[0]} is outside the vocabulary of vocab_size {size}")
        seed = random.SystemRandom().getrandbits(64) if request.seed is None else request.seed
        samples = []
        for k in range(request.samples):
            text = TextStream(self.tokenizer, request.stop) if self.tokenizer else None
            samples.append(Sample(request, k, list(request.tokens), random.Random(f"{seed}/{k}"), text))
        if request.max_new_tokens == 0 and not request.echo:
            for sample in samples:
                sample.finished = "length"
            return samples
        if not self.busy:
            self._way = self._decoder.way(self.model, self._graphs)
            kept = self._decoder.caches
            self._cache = kept.pop() if kept else RowCache(self.model.config, self._way.like)
        scored = request.alternatives if request.echo else None
        self._waiting.append(Prefill(self._way, self._chunk, samples, request.tokens, scored))
        return samples

    @torch.inference_mode()
    def cancel(self, sample: Sample) -> None:
        """End a sample now; nothing happens if it has ended."""
        if sample.finished is None:
            self._end(sample, "cancelled")
            for prefill in self._waiting:
                if sample in prefill.samples:
                    prefill.samples.remove(sample)
            self._waiting = deque(prefill for prefill in self._waiting if prefill.samples)

    @torch.inference_mode()
    def step(self) -> list[Token]:
        """Add a token to every running sample, or several on a GPU, then start those that wait for a row."""
        self.failed = {}
        if not self.busy:
            return []
        tokens = self._decode() + self._admit()
        if self._way.graphs and not (self._waiting or self._running):
            self._decoder.caches.append(self._cache)
        return tokens

    def run(self) -> Iterator[Token]:
        """Yield all tokens of all samples, and raise the error of one that fails."""
        while self.busy:
            yield from self.step()
            for error in self.failed.values():
                raise error

    def _decode(self) -> list[Token]:
        """Add tokens to the running samples whose rows have a place for them; read the windows of others."""
        places = self.model.config.context_length if self._way.cached else 0
        held = zip(self._running, self._cache.lengths, strict=True)
        for sample in [sample for sample, length in held if length >= places]:
            self._leave(sample)
            self._waiting.appendleft(Prefill(self._way, self._chunk, [sample], sample.tokens))
        if not self._running:
            return []
        samples, drawn = list(self._running), []
        ids = to_device([sample.tokens[-1] for sample in samples], self._device)
        for _ in range(self._steps()):
            logits = self._way.step(ids.clamp(min=0), self._cache)
            ids = self._draw(samples, logits)
            drawn.append(ids)
        return [token for ids in torch.stack(drawn).tolist() for token in self._add(samples, ids, logits)]

    def _steps(self) -> int:
        """How many tokens to add before the host reads them."""
        places = self.model.config.context_length - max(self._cache.lengths)
        left = max(sample.request.max_new_tokens - sample.new_tokens for sample in self._running)
        requests = [sample.request for sample in self._running]
        each = any(one.sampling.looks_back or one.alternatives is not None for one in requests)
        return 1 if each else math.ceil(min(self._ahead, places, left))

    def _admit(self) -> list[Token]:
        """Read at most about a chunk of the waiting texts and start their samples."""
        budget, rows = self._chunk, len(self._running)
        admitted: list[Prefill] = []
        while self._waiting and budget > 0 and rows < self.max_samples:
            prefill = self._waiting.popleft()
            admitted.append(prefill)
            rows += len(prefill.samples)
            if not prefill.done:
                budget -= len(prefill.next().tokens)
        if unread := [prefill for prefill in admitted if not prefill.done]:
            self._read(unread)
        if soon := [*admitted, *self._waiting]:
            samples = len(self._running) + sum(len(prefill.samples) for prefill in soon)
            self._cache.reserve(min(samples, self.max_samples), max(prefill.columns for prefill in soon))
        tokens = [token for prefill in admitted if prefill.done for token in self._start(prefill)]
        self._waiting.extendleft(prefill for prefill in reversed(admitted) if prefill.samples)
        return tokens

    def _read(self, prefills: Sequence[Prefill]) -> None:
        """Read the next part of each at once; where that fails, each alone: an error ends one text."""
        parts = [prefill.part for prefill in prefills]
        try:
            logits = torch.split(self._way.read(parts), [part.scored for part in parts])
        except Exception as error:
            if len(prefills) == 1:
                self._fail_text(prefills[0], error)
                return
            for prefill in prefills:
                self._read([prefill])
            return
        for prefill, rows in zip(prefills, logits, strict=True):
            try:
                prefill.take(rows)
            except Exception as error:
                self._fail_text(prefill, error)

    def _fail_text(self, prefill: Prefill, error: Exception) -> None:
        while prefill.samples:
            self._fail(prefill.samples.popleft(), error)

    def _start(self, prefill: Prefill) -> list[Token]:
        """Take those samples of a text for which there are free rows, and draw their next tokens."""
        free = self.max_samples - len(self._running)
        started = [prefill.samples.popleft() for _ in range(min(free, len(prefill.samples)))]
        tokens = [token for sample in started for token in self._echo(sample, prefill.scores)]
        started = [sample for sample in started if not sample.finished]
        for sample in started:
            self._cache.join(prefill.store)
            self._running.append(sample)
        if not started:
            return tokens
        logits = prefill.logits.expand(len(started), -1)
        return tokens + self._add(started, self._draw(started, logits).tolist(), logits)

    def _echo(self, sample: Sample, scored: Sequence[Score]) -> list[Token]:
        """The tokens of the prompt, where they are requested; they end a sample that has no new ones."""
        if not sample.request.echo or sample.new_tokens:
            return []
        *others, last = zip(sample.tokens, scored, strict=True)
        tokens = [self._token(sample, id_, score, echoed=True) for id_, score in others]
        if sample.request.max_new_tokens == 0:
            sample.finished = "length"
        return [*tokens, self._token(sample, *last, echoed=True)]

    def _draw(self, samples: Sequence[Sample], logits: Tensor) -> Tensor:
        """Draw a token for each sample from its logits (N, V): ids (N,), -1 where they are not finite."""
        logits = logits[:, : self.vocab_size].float()
        numbers = to_device([sample.random.random() for sample in samples], self._device, torch.float32)
        groups: dict[Sampling, list[int]] = {}
        for row, sample in enumerate(samples):
            groups.setdefault(sample.request.sampling, []).append(row)
        ids = torch.empty(len(samples), dtype=torch.int64, device=self._device)
        for sampling, rows in groups.items():
            chosen = slice(None) if len(groups) == 1 else to_device(rows, self._device)
            ids[chosen] = sample_tokens(
                logits[chosen],
                sampling,
                seen=[samples[row].tokens for row in rows],
                numbers=numbers[chosen],
                prompt_lengths=[len(samples[row].request.tokens) for row in rows],
            ).to(self._device)
        return ids

    def _add(self, samples: Sequence[Sample], ids: Sequence[int], logits: Tensor) -> list[Token]:
        """Add a token to each sample that has not ended, and end those that are complete."""
        tokens = []
        for row, (sample, id_) in enumerate(zip(samples, ids, strict=True)):
            if sample.finished:
                continue
            if id_ < 0:
                self._fail(sample, InputError(_NOT_FINITE))
                continue
            sample.tokens.append(id_)
            if id_ == sample.request.end:
                sample.finished = "stop"
            elif sample.new_tokens >= sample.request.max_new_tokens:
                sample.finished = "length"
            wanted, score = sample.request.alternatives, UNSCORED
            if wanted is not None:
                score = scores(logits[row : row + 1, : self.vocab_size].float(), [id_], wanted)[0]
            tokens.append(self._token(sample, id_, score))
            if sample.finished:
                self._end(sample, sample.finished)
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
        self.failed[sample] = error
        self._end(sample, "error")

    def _end(self, sample: Sample, reason: str) -> None:
        sample.finished = reason
        if sample in self._running:
            self._leave(sample)

    def _leave(self, sample: Sample) -> None:
        """Free the row of a running sample; as in `RowCache.leave`, the last row takes its number."""
        row, last = self._running.index(sample), self._running.pop()
        self._cache.leave(row)
        if last is not sample:
            self._running[row] = last
