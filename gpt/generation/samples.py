"""The objects of the engine: requests, their samples, and the tokens that it returns.

Shapes: N tokens, V vocab_size.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, SupportsInt

import torch
from torch import Tensor

from gpt.errors import InputError, check_least
from gpt.generation.cache import Read
from gpt.generation.healing import agreeing_ids
from gpt.generation.sampling import Sampling, uniform
from gpt.generation.text import TextStream
from gpt.plain import shown
from gpt.text.tokenizer import Tokenizer

NOT_FINITE = "the model's logits are not finite: its weights are damaged, use an earlier checkpoint"


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """A prompt and how to continue it. Raises InputError for an empty prompt or a number out of its range."""

    tokens: Sequence[int]  # the prompt
    healed: int = 0  # how many of its last tokens are drawn again: see healing.py
    max_new_tokens: int  # each sample ends after this many tokens at the latest
    sampling: Sampling = field(default_factory=Sampling)  # how tokens are drawn
    seed: int | None = None  # sample k's random numbers depend only on it and on k; None takes a random one
    samples: int = 1  # how many texts to write; samples that run together read the prompt once
    end: int | None = None  # a sample ends after this token
    stop: Sequence[str] = ()  # a text ends before these strings; for an engine with a tokenizer
    # Return the log-probability of each token, and of this many most likely ids at its position.
    alternatives: int | None = None
    echo: bool = False  # return the tokens of the prompt before the new ones

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", tuple(map(_plain_id, self.tokens)))
        if not self.tokens:
            raise InputError("expected a prompt of at least one token")
        check_least(0 if self.echo else 1, max_new_tokens=self.max_new_tokens)
        check_least(1, samples=self.samples)
        check_least(0, healed=self.healed, alternatives=self.alternatives)


def _plain_id(token: SupportsInt) -> int:
    """Return an id, also one of NumPy or a tensor, as an int; InputError for what is no whole number."""
    with suppress(TypeError, ValueError, OverflowError):
        if int(token) == token:
            return int(token)
    raise InputError(f"token id {shown(token)} is no whole number")


class LogProbs(NamedTuple):
    """Log-probabilities at the position of a token, in nats: before penalties, temperature and filters."""

    chosen: float
    """The one of the token."""
    likeliest: tuple[tuple[int, float], ...]
    """The most likely ids with theirs, in order."""


@dataclass(frozen=True)
class Token:
    """A token that a step adds to a sample."""

    sample: "Sample"
    id: int
    text: str  # the text that became complete with this token, often ""; always "" without a tokenizer
    logprobs: LogProbs | None  # None if they are not requested, and for the first token of all
    finished: str | None  # why the sample ended, if this is its last token
    echoed: bool  # whether it is a token of the prompt


def window_start(length: int, context_length: int) -> int:
    """Return the index of the first token that the model sees when it continues a text of `length` tokens."""
    shift = max(1, context_length // 2)
    return max(0, -(-(length - context_length) // shift) * shift)


class Beginning:
    """The tokens with which all samples of a request begin. They share them, as a prompt may be long."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None) -> None:
        self.request = request
        self.tokens = list(request.tokens)
        self.rest = b""  # the bytes of the prompt that are still to be drawn
        self.added = 0  # tokens before the prompt: `<|endoftext|>` if all of the prompt is drawn again
        if tokenizer and request.healed and request.max_new_tokens:
            kept = self.tokens[: -request.healed]
            self.rest = tokenizer.decode_bytes(self.tokens[len(kept) :])
            self.added = 0 if kept else 1
            self.tokens = kept or [tokenizer.eot]

    @cached_property
    def ids(self) -> Tensor:
        """The different ids of the tokens."""
        return torch.tensor(sorted(set(self.tokens)))


class Sample:
    """Sample `k` of a request: a text that is being written. It has a row in the cache once it runs.

    While tokens are `unread`, the engine asks for `next_read` and gives it to `take` with its logits. Then
    it calls `add` with a token that it draws from `logits`. The first ones belong to the prompt, until no
    bytes of the prompt are left to be drawn: `rest`.

    Only the last window of a prompt is read. If the prompt's tokens are to be scored, all windows are read.

    The window is the part of the text that the model sees. These are places in the text, and names of what
    lies between them:

        0                 start                         place         length
        |  left behind    |  held: in the cache         |  unread     |

        0         added                       prompt_length           length
        |  added  |  prompt                   |  new tokens           |

        0                    len(beginning.tokens)                    length
        |  beginning         |  drawn                                 |

    Where the last word of a prompt is drawn again, `prompt_length` grows with each of its tokens. If the
    prompt is scored, `logprobs` has an entry for each token of its first part, and at last of all of it.
    """

    logits: Tensor  # (1, V), they predict the token after the last one read; empty before that and at the end

    def __init__(
        self, beginning: Beginning, k: int, seed: int, tokenizer: Tokenizer | None, context: int
    ) -> None:
        self.beginning = beginning
        request = beginning.request
        self.request = request
        self.k = k
        self.context = context
        self.tokenizer = tokenizer
        self.finished: str | None = None  # `stop`, `length`, `cancelled` or `error`; None while it runs
        self.numbers = uniform(seed, k)
        self.text = TextStream(tokenizer, request.stop) if tokenizer else None
        self.drawn: list[int] = []  # the tokens after the beginning
        self.rest = beginning.rest
        self.added = beginning.added
        self.prompt_length = len(beginning.tokens)
        self.is_scored = request.echo and request.alternatives is not None
        self.start = 0 if self.is_scored else window_start(self.prompt_length, context)
        self.place = self.start
        self.logits = torch.empty(0)
        self._seen: Tensor | None = None  # (V,), whether an id came before; made when it is first asked for
        self.logprobs: list[LogProbs | None] = [None]  # nothing predicts the first token

    @property
    def tokens(self) -> list[int]:
        """A new list of the prompt's tokens, then the new ones."""
        return self._between(0, self.length)

    def _between(self, start: int, end: int) -> list[int]:
        """Return the tokens from place `start` on, up to `end`."""
        begun = self.beginning.tokens
        own = self.drawn[max(0, start - len(begun)) : max(0, end - len(begun))]
        return own if start >= len(begun) else begun[start:end] + own

    @property
    def length(self) -> int:
        """The number of tokens of the text."""
        return len(self.beginning.tokens) + len(self.drawn)

    @property
    def new_tokens(self) -> int:
        """The number of tokens added to the prompt."""
        return self.length - self.prompt_length

    @property
    def unread(self) -> int:
        """The number of tokens that are not read yet."""
        return self.length - self.place

    @property
    def held(self) -> int:
        """The number of tokens of the window that are read."""
        return self.place - self.start

    @property
    def _has_logprobs(self) -> bool:
        """Whether every token of the prompt is scored, or none has to be."""
        return not self.is_scored or len(self.logprobs) == self.prompt_length

    def next_read(self, row: int, most: int) -> Read:
        """Return what to read next into a row: at most `most` new tokens."""
        end = min(self.length, self.place + most, self.start + self.context)
        tokens = self._between(self.start, end)
        return Read(row, tokens, self.held, 1 if self._has_logprobs else len(tokens) - self.held)

    def take(self, read: Read, logits: Tensor) -> None:
        """Take the logits (N, V) of the scored tokens of a read."""
        end = self.start + len(read.tokens)
        if not self._has_logprobs:
            # The logits at a position predict the next token. An earlier window may have scored it already.
            known = len(self.logprobs)
            targets = self._between(known, min(self.length, end + 1))
            first = known - 1 - self.place  # after a slide it may be beyond the read: both slices are empty
            count = self.request.alternatives or 0
            self.logprobs += log_probabilities(logits[first : first + len(targets)], targets, count)
        self.place = end
        self.logits = logits[-1:]
        self._slide()

    def _slide(self) -> None:
        """Move the window if it has no room for the next token."""
        if self.unread and self.held == self.context:
            self.start = window_start(self.place + 1, self.context)
            self.place = self.start

    def allowed_logits(self) -> Tensor:
        """Return the logits (1, V); -inf where an id contradicts the prompt."""
        if not self.rest:
            return self.logits
        assert self.tokenizer
        ids = torch.tensor(agreeing_ids(self.tokenizer, self.rest), device=self.logits.device)
        allowed = torch.full_like(self.logits, -torch.inf)
        allowed[:, ids] = self.logits[:, ids]
        return allowed

    def seen(self) -> Tensor:
        """Return (V,), whether repetition of an id is penalized: of those that came before.

        No id is penalized where a token of the prompt is drawn.
        """
        if self._seen is not None:
            return self._seen
        seen = torch.zeros(self.logits.shape[-1], dtype=torch.bool, device=self.logits.device)
        if self.rest:
            return seen
        ids = torch.cat([self.beginning.ids, torch.tensor(self.drawn, dtype=torch.long)])
        seen[ids[ids < len(seen)].to(seen.device)] = True
        self._seen = seen
        return seen

    def copy(self, twin: "Sample") -> None:
        """Take over all that a sample of the same prompt has read, except the last token."""
        self.place = self.length - 1
        self.logprobs = twin.logprobs[: self.length]

    def end(self, reason: str) -> None:
        """End the sample. Free its tensors: its client may keep it until the last of many samples ends."""
        self.finished = reason
        self.logits = torch.empty(0)
        self._seen = None

    def add(self, id_: int, logprobs: LogProbs | None) -> list[Token]:
        """Add a drawn token and return the tokens that are complete now. The sample may end with the last.

        A token of the prompt is complete when all of the prompt is known.
        """
        self.drawn.append(id_)
        typed = len(self.rest)
        if self.rest:
            assert self.tokenizer
            length = len(self.tokenizer.tokens[id_])
            self.rest = self.rest[length:]
            if length <= typed:  # it belongs to the prompt
                self.prompt_length += 1
                if self.is_scored:
                    self.logprobs.append(logprobs)
                self._slide()
                return []
        if self._seen is not None:
            self._seen[id_] = True
        echoed = self.echo_prompt() if self.request.echo and self.new_tokens == 1 else []
        text = self._new_text(id_, typed)
        if id_ == self.request.end or (self.text and self.text.stopped):
            self.finished = "stop"
        elif self.new_tokens >= self.request.max_new_tokens:
            self.finished = "length"
        if self.text and self.finished:
            text += self.text.close()
        self._slide()
        return [*echoed, Token(self, id_, text, logprobs, self.finished, echoed=False)]

    def echo_prompt(self) -> list[Token]:
        """Return the tokens of the prompt. If no token may follow, the sample ends with the last of them."""
        echoed = []
        for place, id_ in enumerate(self._between(self.added, self.prompt_length), start=self.added):
            text = self.text.echo(id_) if self.text else ""
            if place + 1 == self.prompt_length and self.request.max_new_tokens == 0:
                self.finished = "length"
                text += self.text.close() if self.text else ""
            logprobs = self.logprobs[place] if self.is_scored else None
            echoed.append(Token(self, id_, text, logprobs, self.finished, echoed=True))
        return echoed

    def _new_text(self, id_: int, typed: int) -> str:
        """Return the text that is complete with a new token. Its first `typed` bytes belong to the prompt."""
        if not self.text:
            return ""
        of_prompt = self.text.echo(id_, typed) if self.request.echo and typed else ""
        return of_prompt + self.text.feed(id_, typed=typed)


def log_probabilities(logits: Tensor, ids: Sequence[int], count: int) -> list[LogProbs]:
    """Return the log-probabilities of ids (N,) under logits (N, V), each with the `count` most likely ids.

    Raises InputError if one of the ids has none, because logits are not finite.
    """
    values = logits.float().log_softmax(dim=-1)  # (N, V)
    likeliest = values.topk(min(count, logits.shape[-1]))
    index = torch.tensor(ids, dtype=torch.long, device=logits.device)[:, None]  # (N, 1)
    chosen = values.gather(-1, index)[:, 0]  # (N,)
    if not chosen.isfinite().all():
        raise InputError(NOT_FINITE)
    rows = zip(chosen.tolist(), likeliest.indices.tolist(), likeliest.values.tolist(), strict=True)
    return [LogProbs(value, tuple(zip(others, of_others, strict=True))) for value, others, of_others in rows]
