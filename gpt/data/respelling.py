"""BPE-dropout (Provilkov et al. 2020, section 3): a word is split into other tokens each time it is read.

A model memorises a text that it reads often. BPE-dropout reduces that. It needs only the tokens, not the
text, as the bytes of a word are those of its tokens.

Shapes: B windows, n tokens in each.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from gpt.data.stored import Stored
from gpt.text.table import Ranked, merge
from gpt.text.tokenizer import Tokenizer

_LETTERS = rb"[A-Za-z\x80-\xff]"  # bytes of letters of any script, in UTF-8
_CONTINUES = re.compile(_LETTERS + rb"+")  # a token that can continue a word
_CONTINUED = re.compile(rb" ?" + _LETTERS + rb"*")  # a token that can be continued
_SPELLING = 2  # ends the seeds of these random generators: see `windows.py`
_MOST = 8  # tokens of a word that are merged together; the time grows with the square of their bytes


@dataclass(frozen=True, eq=False)
class Respelling:
    """BPE-dropout, which skips each merge of a word's bytes with probability `share`."""

    share: float  # above 0
    tokenizer: Tokenizer
    seed: int

    def __call__(self, rows: Stored, first: int) -> Stored:
        """Respell rows of ids, (B, n) -> (B, n). They are the run's windows from number `first` on.

        A respelled row may have more tokens. It is cut to n.
        """
        respelled = np.empty_like(rows)
        for i, row in enumerate(rows.tolist()):
            merging = _Merging(self.share, np.random.default_rng((self.seed, first + i, _SPELLING)))
            ids = [part for word in self._words(row) for part in self._spell(word, merging)]
            respelled[i] = ids[: len(row)]
        return respelled

    @cached_property
    def _bytes(self) -> list[bytes]:
        """The bytes of each token. `<|endoftext|>` stands as a full stop, which is a word of its own too."""
        return [*self.tokenizer.tokens, b"."]

    @cached_property
    def _continues(self) -> list[bool]:
        """Whether each token can continue a word."""
        return [_CONTINUES.fullmatch(token) is not None for token in self._bytes]

    @cached_property
    def _continued(self) -> list[bool]:
        """Whether another token can continue each token."""
        return [_CONTINUED.fullmatch(token) is not None for token in self._bytes]

    def _words(self, row: list[int]) -> Iterator[list[int]]:
        """Yield the tokens of each word. A token without letters is a word of its own."""
        continues = self._continues
        continued = self._continued
        word = row[:1]
        for token in row[1:]:
            if continues[token] and continued[word[-1]] and len(word) < _MOST:
                word.append(token)
            else:
                yield word
                word = [token]
        yield word

    def _spell(self, word: list[int], merging: "_Merging") -> list[int]:
        """Respell a word. If that gives fewer tokens (rare), keep the word, as the window must stay full."""
        text = b"".join(map(self._bytes.__getitem__, word))
        if merging.leaves(len(text) - len(word)):
            return word
        ranks = self.tokenizer.ranks
        tokens = [ranks[part] for part in merge(text, ranks.get, merging.choose)]
        return tokens if len(tokens) >= len(word) else word


class _Merging:
    """A random choice of the merges that are skipped.

    It draws the distance to the next skipped merge, which takes fewer random numbers than one per merge.
    """

    def __init__(self, share: float, rng: np.random.Generator) -> None:
        self._draw: Callable[[], int] = partial(rng.geometric, share)
        self._next = self._draw()  # how many merges from now the next skipped one is; 1 is the very next

    def leaves(self, merges: int) -> bool:
        """Return whether none of the next `merges` merges is skipped, so that the word does not change.

        At a share of 0.05 most words do not, and for these nothing has to be merged.
        """
        if merges >= self._next:
            return False
        self._next -= merges
        return True

    def choose(self, ranked: list[Ranked]) -> Ranked | None:
        """Return the merge of the lowest rank that is not skipped; None if all are skipped."""
        for candidate in sorted(ranked):
            self._next -= 1
            if self._next:
                return candidate
            self._next = self._draw()
        return None
