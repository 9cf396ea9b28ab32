"""BPE-dropout (Provilkov et al. 2020, section 3): words spelled with other tokens each time they are read.

A text that is read often is then learned by heart less. The bytes of a word are those of its tokens, so the
text itself is not needed.

Shapes: B windows, n tokens in each.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpt.text.table import Ranked, merge

_LETTERS = rb"[A-Za-z\x80-\xff]"  # of any script, in UTF-8
_CONTINUES = re.compile(_LETTERS + rb"+")  # a word
_CONTINUED = re.compile(rb" ?" + _LETTERS + rb"*")
_MOST = 8  # tokens that are merged together: it takes the square of their bytes


@dataclass(frozen=True, eq=False)
class Respelling:
    """Spells the words of windows anew: each merge is left out with a probability of `share`."""

    share: float  # above 0
    tokens: Sequence[bytes]  # by rank
    seed: int

    def __call__(self, rows: NDArray[Any], first: int) -> NDArray[Any]:
        """Rows of ids, (B, n), for a run's windows from number `first` on; what no longer fits falls off."""
        found = np.empty_like(rows)
        for i, row in enumerate(rows.tolist()):
            merging = _Merging(self.share, np.random.default_rng((self.seed, first + i, 2)))
            ids = [part for word in self._words(row) for part in self._spell(word, merging)]
            found[i] = ids[: len(row)]
        return found

    @cached_property
    def _bytes(self) -> list[bytes]:
        return [*self.tokens, b"."]  # `<|endoftext|>` has no merges either

    @cached_property
    def _ranks(self) -> dict[bytes, int]:
        return {token: rank for rank, token in enumerate(self.tokens)}

    @cached_property
    def _letters(self) -> list[list[bool]]:
        """Whether each token can continue a word, and whether the next can continue it."""
        return [[bool(kind.fullmatch(token)) for token in self._bytes] for kind in (_CONTINUES, _CONTINUED)]

    def _words(self, row: list[int]) -> Iterator[list[int]]:
        """The tokens of each word; what is not of letters is one token each."""
        continues, continued = self._letters
        word = row[:1]
        for token in row[1:]:
            if continues[token] and continued[word[-1]] and len(word) < _MOST:
                word.append(token)
            else:
                yield word
                word = [token]
        yield word

    def _spell(self, word: list[int], merging: "_Merging") -> list[int]:
        """As many tokens or more for a word: fewer, which is rare, would not fill the window."""
        text = b"".join(map(self._bytes.__getitem__, word))
        if merging.leaves(len(text) - len(word)):
            return word
        found = [self._ranks[part] for part in merge(text, self._ranks.get, merging.choose)]
        return found if len(found) >= len(word) else word


class _Merging:
    """Which merges are made: the next that is left out is drawn, and not each of those before it."""

    def __init__(self, share: float, rng: np.random.Generator) -> None:
        self._draw: Callable[[], int] = partial(rng.geometric, share)
        self._next = self._draw()  # to be left out, counted from 1

    def leaves(self, merges: int) -> bool:
        """Whether all of the next merges, so many, are made, so that a word stays as it is."""
        if merges >= self._next:
            return False
        self._next -= merges
        return True

    def choose(self, ranked: list[Ranked]) -> Ranked | None:
        """The first merge by rank that is not left out."""
        for each in sorted(ranked):
            self._next -= 1
            if self._next:
                return each
            self._next = self._draw()
        return None
