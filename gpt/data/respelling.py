"""BPE-dropout (Provilkov et al. 2020, section 3): words spelled with other tokens each time they are read.

A text that is read often is then learned by heart less. The bytes of a word are those of its tokens, so the
text itself is not needed. Training waits meanwhile: only words in which a merge is left out are spelled.

Shapes: B windows, n tokens in each, V vocabulary.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import count, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

_LETTERS = rb"[A-Za-z\x80-\xff]"  # of any script, in UTF-8
_CONTINUES = re.compile(_LETTERS + rb"+")  # a word
_CONTINUED = re.compile(rb" ?" + _LETTERS + rb"*")
_MOST = 8  # tokens that are merged together
_NONE = 1 << 62  # above the rank of any token


@dataclass(frozen=True, eq=False)
class Respelling:
    """Spells the words of windows anew: each merge is left out with a probability of `share`."""

    share: float  # above 0
    tokens: Sequence[bytes]  # by rank
    seed: int

    def __call__(self, rows: NDArray[Any], first: int) -> NDArray[Any]:
        """Rows of ids, (B, n), for a run's windows from number `first` on; what no longer fits falls off."""
        found = np.empty_like(rows)
        begins, ends, made = self._words(rows)
        for i, row in enumerate(rows.tolist()):
            merging = _Merging(self.share, np.random.default_rng((self.seed, first + i, 2)))
            ids: list[int] = []
            end = 0
            passed = 0  # merges before it
            while (token := made[i].searchsorted(passed + merging.left)) < len(row):
                begin = begins[i, token]
                if begin:
                    merging.left -= int(made[i, begin - 1]) - passed
                ids += row[end:begin]
                end = ends[i, token]
                passed = int(made[i, end - 1])
                ids += self._spell(row[begin:end], merging)
            found[i] = (ids + row[end:])[: len(row)]
        return found

    def _words(self, rows: NDArray[Any]) -> tuple[NDArray[np.int64], ...]:
        """Where the word of each token begins and ends, and the merges up to the token, (B, n) each."""
        continues, continued, merges = self._of_tokens
        places = np.broadcast_to(np.arange(rows.shape[1]), rows.shape)
        joined = continues[rows[:, 1:]] & continued[rows[:, :-1]]  # to the token before
        joined = np.pad(joined, ((0, 0), (1, 0)))
        begins = np.maximum.accumulate(np.where(joined, 0, places), axis=1)
        begins = places - (places - begins) % _MOST
        last = np.pad(begins[:, 1:] == places[:, 1:], ((0, 0), (0, 1)), constant_values=True)  # of its word
        ends = np.where(last, places, rows.shape[1])[:, ::-1]
        ends = np.minimum.accumulate(ends, axis=1)[:, ::-1] + 1
        return begins, ends, merges[rows].cumsum(axis=1)

    @cached_property
    def _formed(self) -> dict[tuple[int, int], int]:
        """The token that two tokens form, where there is one."""
        ranks = self._ranks
        halves = ((rank, token[:i], token[i:]) for token, rank in ranks.items() for i in range(1, len(token)))
        return {(ranks[a], ranks[b]): rank for rank, a, b in halves if a in ranks and b in ranks}

    @cached_property
    def _single(self) -> list[list[int]]:
        """The tokens of each token's bytes."""
        ranks = self._ranks
        return [[ranks[token[i : i + 1]] for i in range(len(token))] for token in self.tokens]

    @cached_property
    def _ranks(self) -> dict[bytes, int]:
        return {token: rank for rank, token in enumerate(self.tokens)}

    @cached_property
    def _of_tokens(self) -> list[NDArray[np.int64]]:
        """Whether each token can continue a word, whether the next can continue it, and its merges: (V,)."""
        tokens = [*self.tokens, b"."]  # `<|endoftext|>` has no merges either
        kinds = [[bool(kind.fullmatch(token)) for token in tokens] for kind in (_CONTINUES, _CONTINUED)]
        return [*map(np.array, kinds), np.array([len(token) - 1 for token in tokens])]

    def _spell(self, word: list[int], merging: "_Merging") -> list[int]:
        """As many tokens or more for a word: fewer, which is rare, would not fill the window."""
        spelled = [part for token in word for part in self._single[token]]
        formed = [self._formed.get(pair, _NONE) for pair in pairwise(spelled)]  # by each and the next
        while (place := merging.choose(formed)) is not None:
            spelled[place : place + 2] = [formed.pop(place)]
            for i in range(max(place - 1, 0), min(place + 1, len(formed))):
                formed[i] = self._formed.get((spelled[i], spelled[i + 1]), _NONE)
        return spelled if len(spelled) >= len(word) else word


class _Merging:
    """Which merges are made: the next that is left out is drawn, and not each of those before it."""

    def __init__(self, share: float, rng: np.random.Generator) -> None:
        self._draw: Callable[[], int] = partial(rng.geometric, share)
        self.left = self._draw()  # merges up to the next that is left out

    def choose(self, formed: list[int]) -> int | None:
        """The place of the first by rank that is not left out."""
        lowest = min(formed, default=_NONE)
        if self.left > 1 and lowest != _NONE:  # as usual
            self.left -= 1
            return formed.index(lowest)
        for token, place in sorted(zip(formed, count(), strict=False)):
            if token == _NONE:
                break
            self.left -= 1
            if self.left:
                return place
            self.left = self._draw()
        return None
