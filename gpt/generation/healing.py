"""Token healing: a typed text may end inside a token. It is continued as if it did not.

A text is cut into tokens word by word. So text that follows a typed text can change only the tokens of its
last word. For example, "The functio" ends with " fun", "ct", "io", while "The function" is "The" and just one
more token. So the tokens of the last word are removed and drawn again, together with the first new token. The
word, or a longer text that begins with it, can be cut in several ways. Each way has the probability that the
model gives its tokens (Phan et al. 2024). Only ways that the tokenizer itself can produce count.
gpt/share/healing.js does the same in a browser.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from gpt.generation.sampling import Sampling, sample_tokens
from gpt.text.tokenizer import Tokenizer, last_word

_LONGEST = 64  # bytes that are removed at most, unless one token has more

Path = tuple[int, ...]
"""Tokens at the beginning of the word."""


class Way(NamedTuple):
    """Several ways to cut the word. They differ only in the last token, which holds the word's end."""

    before: Path
    """The tokens before the last one."""
    ids: tuple[int, ...]
    """The ids that the last token can have, in order."""
    end: int | None
    """The id among these whose text ends where the word does, if there is one."""
    typed: int
    """How many bytes of the last token belong to the word."""


class Spelling(NamedTuple):
    """The drawn tokens: the prompt's last ones, and the first new one if it begins in the prompt."""

    prompt: Path
    first: int | None
    typed: int
    """How many bytes of `first` belong to the prompt."""


@dataclass(frozen=True)
class Ending:
    """The last word of a typed text, and all ways to cut it."""

    word: Path  # its tokens as the tokenizer cuts the typed text
    ways: tuple[Way, ...]
    is_all: bool  # whether the word is all of the text, so that `<|endoftext|>` takes its place

    @property
    def longest(self) -> int:
        """The number of tokens of the longest way."""
        return max(len(way.before) for way in self.ways) + 1


class Prompt(NamedTuple):
    """A text as tokens: at least one that stays, and the ending that is drawn again."""

    tokens: list[int]
    ending: Ending | None = None


def typed_prompt(tokenizer: Tokenizer, text: str) -> Prompt:
    """Return the prompt for a typed text. Its tokens are `<|endoftext|>` if no token of the text stays."""
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
    if sum(len(way.ids) for way in ways) < 2:  # there is no choice
        return Prompt(ids or [tokenizer.eot])
    return Prompt(ids[:place] or [tokenizer.eot], Ending(word, ways, is_all=place == 0))


@lru_cache(maxsize=64)  # prompts that end with the same word share their ways
def _ways(tokenizer: Tokenizer, word: bytes) -> tuple[Way, ...]:
    """Return all ways to cut a word, grouped by where the token with the word's end begins."""
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
    """Whether the tokenizer gives `before` and then token `id_`, which begins with `rest`, for some text."""
    token = tokenizer.tokens[id_]
    if _is_blank(start) and _is_blank(rest) and len(rest) == 1:
        # After several blanks, the next word takes the last one if it is a space. Another blank does not
        # join a word.
        in_next_word = rest == b" " and not _is_blank(token)
        if in_next_word or (token == rest != b" "):
            return True
    # The tokens stay apart if neither the two neighbours merge nor the whole text is one token.
    last = before[-1]
    is_token = start + token in tokenizer.ranks
    return not is_token and tokenizer.encode_word(tokenizer.tokens[last] + token) == [last, id_]


def _is_blank(text: bytes) -> bool:
    return text.decode(errors="replace").isspace()


class Search:
    """A search for the model's probability of each way. Samples of one prompt can share it.

    Shapes: T tokens of a path, V vocab_size, W choices: the last tokens of all ways together.
    """

    def __init__(self, ending: Ending, drawn: int | None) -> None:
        self.ending = ending
        self._drawn = drawn  # only ids below this may be drawn
        self._known: dict[Path, Tensor] = {}  # the log-probabilities (V) of the token after a path

    @property
    def next_path(self) -> Path | None:
        """The next path to read after the prompt's remaining tokens. None when all paths are known."""
        missing = [way.before for way in self.ending.ways if way.before not in self._known]
        return max(missing, key=len, default=None)

    def take(self, path: Path, logits: Tensor) -> None:
        """Take the logits (T, V) after each token of a path.

        For the empty path they are the logits (1, V) after the prompt's remaining tokens.
        """
        first = 1 if path else 0
        for place, row in enumerate(logits[:, : self._drawn].float().log_softmax(dim=-1), first):
            self._known[path[:place]] = row

    def draw(self, sampling: Sampling, seen: Sequence[int], number: float) -> Spelling | None:
        """Draw one way, with the same settings as for a token. None if the logits are not finite.

        The repetition penalty applies only to tokens that add something to the text.
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
        """Return the log-probability of the way with each of its last tokens, (ids,)."""
        before = way.before
        common = sum(self._known[before[:place]][id_] for place, id_ in enumerate(before))
        last = self._known[before]
        return common + last[torch.tensor(way.ids, device=last.device)]
