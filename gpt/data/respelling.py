"""BPE-dropout (Provilkov et al. 2020, section 3): tokens spelled in other ways, anew each time they are read.

A text that is read often is then learned by heart less. Leaving out merges needs the text; here they are left
out within each token, which needs the token alone.

Shapes: B windows, n tokens in each.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpt.text.table import merge

_WAYS = 64  # in which a token may be spelled, most of them as it is


@dataclass(frozen=True, eq=False)
class Respelling:
    """Spells the tokens of windows anew, with a share of the merges left out."""

    share: float
    tokens: Sequence[bytes]  # by rank
    seed: int

    def __call__(self, rows: NDArray[Any], first: int) -> NDArray[Any]:
        """Rows of ids, (B, n), for a run's windows from number `first` on; what no longer fits falls off."""
        found = np.empty_like(rows)
        for i, row in enumerate(rows.tolist()):
            ways = np.random.default_rng((self.seed, first + i, 2)).integers(_WAYS, size=len(row)).tolist()
            ids = [part for token, way in zip(row, ways, strict=True) for part in self.spell(token, way)]
            found[i] = ids[: len(row)]
        return found

    @cached_property
    def _ranks(self) -> dict[bytes, int]:
        return {token: rank for rank, token in enumerate(self.tokens)}

    @lru_cache(maxsize=1 << 18)  # noqa: B019 (as long as a run)
    def spell(self, token: int, way: int) -> Sequence[int]:
        """The ids that a token is spelled with; those of all ways are a sample."""
        if token == len(self.tokens):  # `<|endoftext|>`
            return [token]
        draw = random.Random(f"{self.seed} {token} {way}").random

        def kept(pair: bytes) -> int | None:
            rank = self._ranks.get(pair)
            return rank if rank is not None and draw() >= self.share else None

        return [self._ranks[part] for part in merge(self.tokens[token], kept)]
