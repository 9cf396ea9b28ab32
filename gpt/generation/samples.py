"""The objects of the engine: requests, their samples, and the tokens that it returns.

Shapes: N tokens, V vocab_size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gpt.errors import InputError, check_least
from gpt.generation.cache import Read
from gpt.generation.healing import Ending, Search, Spelling
from gpt.generation.sampling import Sampling, uniform
from gpt.generation.text import TextStream
from gpt.text.tokenizer import Tokenizer

# The log-probability of a token in nats, and the most likely ids at its position with theirs.
Score = tuple[float | None, tuple[tuple[int, float], ...]]
UNSCORED: Score = (None, ())


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """A prompt and how to continue it. Raises InputError for an empty prompt or a number out of its range."""

    tokens: Sequence[int]  # the prompt, without its ending if there is one
    ending: Ending | None = None  # its last word, which may be cut into other tokens: see healing.py
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
        if not len(self.tokens):
            raise InputError("expected a prompt of at least one token")
        check_least(0 if self.echo else 1, max_new_tokens=self.max_new_tokens)
        check_least(1, samples=self.samples)

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of the prompt as the client gave it."""
        if self.ending is None:
            return len(self.tokens)
        return len(self.ending.word) + (0 if self.ending.is_all else len(self.tokens))


@dataclass(frozen=True)
class Token:
    """A token that a step adds to a sample."""

    sample: "Sample"
    id: int
    text: str  # the text that became complete with this token, often ""; always "" without a tokenizer
    log_probability: float | None  # before penalties, temperature and filters, in nats; None if not requested
    alternatives: tuple[tuple[int, float], ...]  # the most likely ids first, with their log-probabilities
    finished: str | None  # why the sample ended, if this is its last token
    echoed: bool  # whether it is a token of the prompt


def window_start(length: int, context_length: int) -> int:
    """Return the index of the first token that the model sees when it continues a text of `length` tokens."""
    shift = max(1, context_length // 2)
    return max(0, -(-(length - context_length) // shift) * shift)


class Sample:
    """Sample `k` of a request: a text that is being written. It has a row in the cache once it runs.

    Its phases, in order. Only a sample whose prompt has a word to draw (`search` is set) has the second and
    the third.

    1. Read the prompt, while `unread` > 0: `take` moves `read` and sets `logits`, and `scores` if they are
       asked for.
    2. Read paths, while `unread` is 0 and `path` is not None: `take` gives their logits to `search`, and
       `read` stays.
    3. Draw the word, once: `draw_word` sets `spelling` and adds its tokens to `tokens` and the prompt. They
       are read as in phase 1. If the word ends inside a new token, that is `first`.
    4. Draw tokens, while `is_settled`: when `unread` is 0, `add` appends `first` or a token drawn from
       `logits`, and it is read as in phase 1. The token that sets `finished` ends the sample.

    `end` sets `finished` in any phase. A sample that copies a twin of the same prompt begins with only the
    prompt's last token unread, and with the twin's `search`.

    Only the last window of a prompt is read. If the prompt's tokens are to be scored, all windows are read.

    Its fields change by its methods only. The engine asks for the next `part` to read and gives it to `take`;
    when nothing is left to read, it calls `draw_word` once and then `add` for each drawn token.
    """

    logits: Tensor  # (1, V), they predict the token after the last one read

    def __init__(
        self, request: Request, k: int, seed: int, tokenizer: Tokenizer | None, context: int
    ) -> None:
        self.request = request
        self.k = k
        self.context = context
        self.tokens = list(request.tokens)  # the prompt, then the new tokens
        self.finished: str | None = None  # `stop`, `length`, `cancelled` or `error`; None while it runs
        self.numbers = uniform(seed, k)
        self.text = TextStream(tokenizer, request.stop) if tokenizer else None
        # If the prompt's last word is to be drawn: the search among its ways, and then what was drawn.
        self.search: Search | None = None
        self.spelling: Spelling | None = None
        if ending := request.ending:
            # The word must leave room in the window for the text before it.
            if request.max_new_tokens > 0 and ending.longest <= context // 2:
                self.search = Search(ending, tokenizer.n_vocab if tokenizer else None)
            else:
                self.tokens = [*([] if ending.is_all else self.tokens), *ending.word]
        self.prompt_length = len(self.tokens)
        self.is_scored = request.echo and request.alternatives is not None
        self.start = 0 if self.is_scored else window_start(self.prompt_length, context)  # of the window
        self.read = self.start  # the next token to read
        # The scores of the prompt's tokens so far. Nothing predicts the first one, so it has none.
        self.scores = [UNSCORED] * (1 if self.is_scored else self.prompt_length)

    @property
    def prompt(self) -> list[int]:
        """The tokens of the prompt, as they are read."""
        return self.tokens[: self.prompt_length]

    @property
    def added(self) -> int:
        """The number of tokens added before the prompt: `<|endoftext|>` if the word to draw is all of it."""
        return 1 if self.search and self.search.ending.is_all else 0

    @property
    def text_tokens(self) -> list[int]:
        """The prompt's and the new tokens, without a token that was added before the prompt."""
        return self.tokens[self.added :]

    @property
    def new_tokens(self) -> int:
        """The number of tokens added to the prompt."""
        return len(self.tokens) - self.prompt_length

    @property
    def unread(self) -> int:
        """The number of tokens that are not read yet."""
        return len(self.tokens) - self.read

    @property
    def held(self) -> int:
        """The number of tokens of the window that are read."""
        return self.read - self.start

    @property
    def is_settled(self) -> bool:
        """Whether the prompt is known to its end, as no word of it is left to draw."""
        return self.search is None or self.spelling is not None

    @property
    def first(self) -> int | None:
        """The first new token, if it was drawn with the prompt's last word and is not added yet."""
        return self.spelling.first if self.spelling and not self.new_tokens else None

    @property
    def path(self) -> tuple[int, ...] | None:
        """The next path of the search to read after the prompt's tokens. None if there is none."""
        return self.search.next_path if self.search and not self.spelling else None

    @property
    def is_reading(self) -> bool:
        """Whether something must be read before the next token can be drawn."""
        return self.unread > 0 or self.path is not None

    @property
    def _has_scores(self) -> bool:
        """Whether every token of the prompt is scored, or none has to be."""
        return len(self.scores) == self.prompt_length

    def part(self, row: int, most: int) -> Read:
        """Return the next part to read into a row: at most `most` tokens, or a path of the search."""
        if self.unread == 0 and self.path:
            return Read(row, [*self.tokens[self.start :], *self.path], self.held, len(self.path))
        tokens = self.tokens[self.start : min(self.read + most, self.start + self.context)]
        return Read(row, tokens, self.held, 1 if self._has_scores else len(tokens) - self.held)

    def take(self, part: Read, logits: Tensor) -> None:
        """Take the logits (N, V) of the scored tokens of a part that was read."""
        end = self.start + len(part.tokens)
        if self.search and end > len(self.tokens):
            self.search.take(tuple(part.tokens[len(self.tokens) - self.start :]), logits)
            return
        if not self._has_scores:
            # The logits at a position predict the next token. An earlier window may have scored it already.
            known = len(self.scores)
            targets = self.tokens[known : end + 1]
            count = self.request.alternatives or 0
            first = known - 1 - self.read
            self.scores += scores(logits[first : first + len(targets)], targets, count)
        self.read = end
        self.logits = logits[-1:]
        self._slide()
        if self.search and not self.spelling and self.unread == 0:
            self.search.take((), self.logits)

    def _slide(self) -> None:
        """Move the window if it has no room for the next token, or for the longest way of the search."""
        room = 0
        if self.unread:
            room = 1
        elif self.search and not self.spelling:
            room = self.search.ending.longest
        if self.held + room > self.context:
            self.start = window_start(self.read + room, self.context)
            self.read = self.start

    def draw_word(self) -> bool:
        """Draw the tokens of the prompt's last word. False if the logits are not finite."""
        assert self.search
        seen = [*self.tokens, *self.search.ending.word]
        spelling = self.search.draw(self.request.sampling, seen, next(self.numbers))
        if spelling is None:
            return False
        self._settle(spelling)
        return True

    def _settle(self, spelling: Spelling) -> None:
        """Add the drawn tokens of the prompt's last word, which may begin a new token."""
        self.spelling = spelling
        self.tokens += spelling.prompt
        self.prompt_length = len(self.tokens)
        start = window_start(self.prompt_length, self.context)
        if start != self.start:
            self.start = start
            self.read = start
        elif self.is_scored and spelling.prompt:
            self.read -= 1  # reading this token again gives the logits that score the first drawn token
        if not self.is_scored:
            self.scores += [UNSCORED] * len(spelling.prompt)

    def copy(self, twin: "Sample") -> None:
        """Take over all that a sample of the same prompt has read, except the last token; and its search."""
        length = len(self.tokens)
        self.read = length - 1
        self.scores = twin.scores[:length]
        self.search = twin.search

    def echo_prompt(self) -> list[Token]:
        """Return the prompt's tokens; with no new tokens to add, the sample ends with the last of them."""
        return [self._emit(place, self.scores[place]) for place in range(self.added, len(self.scores))]

    def add(self, id_: int, score: Score) -> Token:
        """Add a drawn token and return it with its text. The sample may end with it."""
        self.tokens.append(id_)
        token = self._emit(len(self.tokens) - 1, score)
        self._slide()
        return token

    def end(self, reason: str) -> None:
        """End the sample for a reason that its text does not give."""
        self.finished = reason

    def _emit(self, place: int, score: Score) -> Token:
        """Feed the token at an index of `tokens` to the text, and return it with the text it completes.

        The sample ends with it if it is the last one.
        """
        request = self.request
        id_ = self.tokens[place]
        new = place + 1 - self.prompt_length
        text = ""
        if new > 0 and id_ == request.end:
            self.finished = "stop"
        elif new >= request.max_new_tokens:
            self.finished = "length"
        if self.text:
            typed = self.spelling.typed if self.spelling and new == 1 else 0
            if request.echo and new <= 1:
                text = self.text.echo(id_, None if new <= 0 else typed)
            if new > 0:
                text += self.text.feed(id_, typed=typed)
            if self.text.stopped:
                self.finished = "stop"
            if self.finished:
                text += self.text.close()
        return Token(self, id_, text, *score, finished=self.finished, echoed=new <= 0)


def scores(logits: Tensor, ids: Sequence[int], count: int) -> list[Score]:
    """Return the scores of ids (N,) under logits (N, V), each with `count` alternatives."""
    log_probabilities = logits.float().log_softmax(dim=-1)  # (N, V)
    likeliest = log_probabilities.topk(min(count, logits.shape[-1]))
    index = torch.tensor(ids, dtype=torch.long, device=logits.device)[:, None]  # (N, 1)
    chosen = log_probabilities.gather(-1, index)[:, 0]  # (N,)
    rows = zip(chosen.tolist(), likeliest.indices.tolist(), likeliest.values.tolist(), strict=True)
    return [(chosen, tuple(zip(others, values, strict=True))) for chosen, others, values in rows]
