"""What the engine works on: requests, their samples and tokens, and texts that are read chunk by chunk.

Shapes: N tokens, V vocab_size.
"""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gpt.errors import InputError, check_least
from gpt.generation.cache import Read
from gpt.generation.sampling import Sampling
from gpt.generation.text import TextStream

# The log-probability of a token in nats, and the likeliest ids in its place with theirs.
Score = tuple[float | None, tuple[tuple[int, float], ...]]
UNSCORED: Score = (None, ())


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


def window_start(length: int, context_length: int) -> int:
    """The first token that the model sees when it predicts the one after a text of `length` tokens."""
    shift = max(1, context_length // 2)
    return max(0, -(-(length - context_length) // shift) * shift)


class Text:
    """A row of the cache, for the samples whose tokens are the same so far: one, once it runs.

    Its last window is read, or every window of a prompt whose tokens are to be scored.
    """

    row: int
    logits: Tensor  # (1, V), of the token after the last one read

    def __init__(self, samples: Sequence[Sample], context: int) -> None:
        self.samples, self.context = deque(samples), context
        request, length = samples[0].request, len(samples[0].tokens)
        # How many alternatives to the tokens of the prompt are wanted; None without scores.
        self.scored = request.alternatives if request.echo else None
        # The first token of the window, and the next one to read.
        self.start = self.read = window_start(length, context) if self.scored is None else 0
        self.scores = [UNSCORED] * (length if self.scored is None else 1)  # nothing predicts the first

    @property
    def sample(self) -> Sample:
        """One of its samples."""
        return self.samples[0]

    @property
    def unread(self) -> int:
        """How many tokens are left to read."""
        return len(self.sample.tokens) - self.read

    @property
    def columns(self) -> int:
        """Columns to reserve: the text and at most as many new tokens."""
        length = min(len(self.sample.tokens), self.context)
        left = self.sample.request.max_new_tokens - self.sample.new_tokens
        return min(length + min(left, length), self.context)

    @property
    def runs(self) -> bool:
        """Whether one token is left to read, the last that was drawn."""
        return self.unread == 1

    @property
    def held(self) -> int:
        """How many tokens of the window are read."""
        return self.read - self.start

    def part(self, most: int, cached: bool) -> Read:
        """At most so many tokens to read next, or without a cache the window up to them."""
        first = self.read if cached else self.start
        end = min(self.read + (most if cached else self.context), self.start + self.context)
        tokens = self.sample.tokens[first:end]
        scored = 1 if self.scored is None else first + len(tokens) - self.read
        return Read(self.row, first - self.start, tokens, scored)

    def take(self, part: Read, logits: Tensor) -> None:
        """The logits (N, V) of the scored tokens of a part."""
        end = self.start + part.held + len(part.tokens)
        if self.scored is not None:
            # The logits at a position predict the next token; earlier windows may have scored it.
            known = len(self.scores)
            targets = self.sample.tokens[known : end + 1]
            self.scores += scores(logits[known - 1 - self.read :][: len(targets)], targets, self.scored)
        self.read, self.logits = end, logits if len(logits) == 1 else logits[-1:]
        self.slide()

    def slide(self) -> None:
        """Move the window where it is full and there is a token after it."""
        if self.unread > 0 and self.read == self.start + self.context:
            self.start = self.read = window_start(self.read + 1, self.context)


def scores(logits: Tensor, ids: Sequence[int], count: int) -> list[Score]:
    """The scores of ids (N,) under logits (N, V), each with this many alternatives."""
    log_probabilities = logits.float().log_softmax(dim=-1)  # (N, V)
    likeliest = log_probabilities.topk(min(count, logits.shape[-1]))
    index = torch.tensor(ids, dtype=torch.long, device=logits.device)[:, None]  # (N, 1)
    chosen = log_probabilities.gather(-1, index)[:, 0]  # (N,)
    rows = zip(chosen.tolist(), likeliest.indices.tolist(), likeliest.values.tolist(), strict=True)
    return [(chosen, tuple(zip(others, values, strict=True))) for chosen, others, values in rows]
