"""Token healing: a typed text may end inside a token, and is continued as if it did not.

A text is cut into tokens word by word, so what follows a typed text can change the tokens of its last word
alone: "The functio" ends with " fun", "ct", "io", while "The function" is one token more than "The". So the
last word is taken back, and its tokens are drawn again, together with the first new one: each way to cut the
word, or a text that begins with it, is as likely as the model finds its tokens (Phan et al. 2024). Only ways
that the tokenizer itself can give count. gpt/share/healing.js does the same in a browser.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from gpt.generation.sampling import Sampling, sample_tokens
from gpt.text.tokenizer import Tokenizer, last_word

_LONGEST = 64  # bytes that are taken back, unless one token has more

Path = tuple[int, ...]
"""Tokens at the beginning of the word."""


class Way(NamedTuple):
    """Ways to cut the word that differ in one token: the one that has the word's end."""

    before: Path
    """The tokens before it."""
    ids: tuple[int, ...]
    """What it can be, in the order of ids."""
    end: int | None
    """Which of these is the word's end and nothing more."""
    typed: int
    """How many bytes of the others are the word's."""


class Spelling(NamedTuple):
    """What was drawn: the prompt's last tokens, and the first new one if it begins in the prompt."""

    prompt: Path
    first: int | None
    typed: int
    """How many bytes of `first` are the prompt's."""


@dataclass(frozen=True)
class Ending:
    """The last word of a typed text, and all ways to cut it."""

    word: Path  # its tokens as the text alone gives them
    ways: tuple[Way, ...]
    is_all: bool  # whether nothing of the text stays, so that `<|endoftext|>` stands in its place

    @property
    def longest(self) -> int:
        """The most tokens of a way."""
        return max(len(way.before) for way in self.ways) + 1


class Prompt(NamedTuple):
    """A text as tokens, at least one: those that stay, and the ending that is drawn again."""

    tokens: list[int]
    ending: Ending | None = None


def typed_prompt(tokenizer: Tokenizer, text: str) -> Prompt:
    """The tokens of a typed text; `<|endoftext|>` precedes one that is empty or taken back as a whole."""
    ids = tokenizer.encode(text)
    lengths = tokenizer.byte_lengths()
    size = len(last_word(text).encode())
    place = len(ids)
    taken = 0
    while place > 0 and taken < size:
        taken += int(lengths[ids[place - 1]])
        if taken > _LONGEST and place < len(ids):
            break
        place -= 1
    word = tuple(ids[place:])
    ways = _ways(tokenizer, tokenizer.decode_bytes(word))
    if sum(len(way.ids) for way in ways) < 2:  # nothing is to be drawn
        return Prompt(ids or [tokenizer.eot])
    return Prompt(ids[:place] or [tokenizer.eot], Ending(word, ways, is_all=place == 0))


@lru_cache(maxsize=64)  # prompts that end with the same word share their ways
def _ways(tokenizer: Tokenizer, word: bytes) -> tuple[Way, ...]:
    """All ways to cut a word, by where the token begins that has its end."""
    ways = []
    for place in range(len(word)):
        before = tokenizer.encode_word(word[:place])
        rest = word[place:]
        ids = tokenizer.ids_beginning_with(rest)
        if place > 0:
            ids = tuple(id_ for id_ in ids if _can_follow(tokenizer, word[:place], before, rest, id_))
        if ids:
            end = next((id_ for id_ in ids if tokenizer.tokens[id_] == rest), None)
            ways.append(Way(tuple(before), ids, end, len(rest)))
    return tuple(ways)


def _can_follow(tokenizer: Tokenizer, start: bytes, before: list[int], rest: bytes, id_: int) -> bool:
    """Whether the tokenizer gives `before` and then this token, which begins with `rest`, in some text."""
    token = tokenizer.tokens[id_]
    if _is_blank(start) and _is_blank(rest) and len(rest) == 1:
        # What is no blank takes the last of several, if that is a space, into its word, else leaves it alone.
        in_next_word = rest == b" " and not _is_blank(token)
        if in_next_word or (token == rest != b" "):
            return True
    # Tokens are never merged across a place where neither a pair of them nor the whole word would be.
    last = before[-1]
    is_token = start + token in tokenizer.ranks
    return not is_token and tokenizer.encode_word(tokenizer.tokens[last] + token) == [last, id_]


def _is_blank(text: bytes) -> bool:
    return text.decode(errors="replace").isspace()


class Search:
    """Learns from the model how likely each way is. Samples of one prompt can share it.

    Shapes: T tokens of a path, V vocab_size, W ways times what the last token of each can be.
    """

    def __init__(self, ending: Ending, drawn: int | None) -> None:
        self.ending = ending
        self._drawn = drawn  # so many of the ids may be drawn
        self._known: dict[Path, Tensor] = {}  # log-probabilities (V) of the token after it

    @property
    def unread(self) -> Path | None:
        """Tokens to read after those of the prompt that stay; None when all is known."""
        missing = [way.before for way in self.ending.ways if way.before not in self._known]
        return max(missing, key=len, default=None)

    def take(self, path: Path, logits: Tensor) -> None:
        """The logits (T, V) after each token of a path, or (1, V) after what stays of the prompt."""
        first = 1 if path else 0
        for place, row in enumerate(logits[:, : self._drawn].float().log_softmax(dim=-1), first):
            self._known[path[:place]] = row

    def draw(self, sampling: Sampling, seen: Sequence[int], number: float) -> Spelling | None:
        """Draw one way, with settings as for a token; None where the logits are not finite.

        The repetition penalty counts for tokens that add something to the text.
        """
        ways = self.ending.ways
        weights = torch.cat([self._log_probability(way) for way in ways])  # (W,)
        choices = [(way, id_) for way in ways for id_ in way.ids]
        again = set(seen) if sampling.repetition_penalty != 1 else set()
        penalized = [k for k, (way, id_) in enumerate(choices) if id_ in again and id_ != way.end]
        (index,) = sample_tokens(weights[None], sampling, [penalized], torch.tensor([number])).tolist()
        if index < 0:
            return None
        way, id_ = choices[index]
        if id_ == way.end:
            return Spelling((*way.before, id_), None, 0)
        return Spelling(way.before, id_, way.typed)

    def _log_probability(self, way: Way) -> Tensor:
        """Of the way with each of its last tokens, (ids,)."""
        before = way.before
        common = sum(self._known[before[:place]][id_] for place, id_ in enumerate(before))
        last = self._known[before]
        return common + last[torch.tensor(way.ids, device=last.device)]
