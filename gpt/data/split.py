"""Decide which part of a corpus is held out. This happens only here, and from the text only.

The text is divided into units. A unit is a document. A longer document is cut into units of at most a
twentieth of the held-out text, so that at least about twenty units are held out. An example is never cut.
The units with the lowest hashes are held out. So equal documents are in the same split.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from gpt.data.corpus import Corpus, evenly_spread
from gpt.data.documents import Piece
from gpt.errors import InputError
from gpt.text.tokenizer import split_at_words

SPLITS = ("train", "val")
SAMPLE_BYTES = 32 << 20  # the most text in memory at once
LEARNED_BYTES = 8 << 20  # the text to learn a vocabulary from; a larger text gives more
_LEAST_UNIT = 1 << 10  # bytes; the limit of a unit is no lower, if the held-out text is larger
_HASHES = 1 << 64
_UNLIMITED = 1 << 62  # bytes


def held_out_bytes(size: float) -> float:
    """How many bytes of a text of `size` bytes are held out.

    It is a tenth up to one megabyte. For a longer text it is 100 times the square root of its bytes.
    """
    return min(size / 10, 100 * size**0.5)


@dataclass(frozen=True)
class Rule:
    """Which units are held out."""

    longest: int
    """The most bytes of a unit."""
    below: int
    """Units with a hash below this are held out."""
    share: float
    """The share of the text that is held out. It is approximate unless all of the text was read."""

    @classmethod
    def of(cls, size: int, val_fraction: float | None = None) -> "Rule":
        """The rule for a text of `size` bytes. A part of a large text has the same units as all of it."""
        usual = held_out_bytes(min(size, SAMPLE_BYTES))
        fraction = held_out_bytes(size) / max(size, 1) if val_fraction is None else val_fraction
        return cls(int(max(1, usual / 20, min(usual, _LEAST_UNIT))), int(fraction * _HASHES), fraction)

    def exact(self, pieces: Iterable[Piece]) -> "Rule":
        """The rule for exactly these pieces.

        It holds out no more than its share, but at least one of two units if the share is above 0. The unit
        with the highest hash is never held out.
        """
        sizes: dict[int, int] = {}
        for _, units in _units(pieces, self.longest):
            for drawn, text in units:
                sizes[drawn] = sizes.get(drawn, 0) + len(text.encode())
        total = max(1, sum(sizes.values()))
        held = 0
        below = 0
        for drawn, size in sorted(sizes.items())[:-1]:
            if not self.share or (held and held + size > self.share * total):
                break
            held += size
            below = drawn + 1
        return Rule(self.longest, below, held / total)


class Divided:
    """A corpus in two parts, `train` and `val`.

    Args:
        val_fraction: the fraction of the text to hold out, by default as `held_out_bytes` says.
        most_bytes: read only about this many bytes of a longer text, see `Corpus.pieces`.

    Raises:
        InputError: `val_fraction` is outside [0, 1), or the corpus cannot be read.
    """

    def __init__(
        self, source: Corpus, val_fraction: float | None = None, most_bytes: int | None = None
    ) -> None:
        if val_fraction is not None and not 0.0 <= val_fraction < 1.0:
            raise InputError(f"val_fraction must be in [0, 1), got {val_fraction}")
        self.source = source
        most = most_bytes or _UNLIMITED
        there, pieces = _measure(source, most)
        self.drawn = most_bytes if most < there else None
        """`most_bytes` if only a part of the text is read, else None."""
        self._all = pieces  # all pieces, if they fit into memory
        self.size = min(most, there) if pieces is None else sum(len(piece.text.encode()) for piece in pieces)
        """The bytes of UTF-8 text in both parts. For a large text this is an estimate."""
        self.rule = Rule.of(self.size, val_fraction)
        if pieces is not None:
            self.rule = self.rule.exact(pieces)
            self._all = list(divide(pieces, self.rule))

    def pieces(self) -> Iterable[Piece]:
        """All pieces, in order."""
        return self._all or divide(self.source.pieces(self.drawn), self.rule)

    def sample(self) -> Iterable[Piece]:
        """Return all pieces of a text of up to `SAMPLE_BYTES`, and some parts of a larger text.

        Then a larger share is held out than in `pieces`. What is `train` here is `train` in `pieces` too.
        """
        if self._all:
            return self._all
        rule = max(self.rule, Rule.of(SAMPLE_BYTES), key=lambda rule: rule.below)
        return divide(self.source.pieces(SAMPLE_BYTES), rule)

    def to_learn_from(self) -> list[str]:
        """Text to learn a vocabulary from: parts spread over the training text. A larger text gives more."""
        share = max(LEARNED_BYTES, self.size / 16) / max(1, min(self.size, SAMPLE_BYTES))
        train = (piece.text for piece in self.sample() if piece.split == "train")
        return [text for number, text in enumerate(train) if evenly_spread(number) < share]


def _measure(source: Corpus, most: int) -> tuple[int, list[Piece] | None]:
    """Estimate the bytes of a corpus. Return them with its pieces, at most `most` bytes of them.

    The pieces are None if they do not fit into memory.
    """
    known = source.size()
    if known is not None and min(known, most) > SAMPLE_BYTES:
        return known, None
    limit = min(most, SAMPLE_BYTES)
    pieces = list(source.pieces(limit))
    read = sum(len(piece.text.encode()) for piece in pieces)
    there = known
    if there is None and read < limit:
        there = read
    if most <= SAMPLE_BYTES or (there is not None and read <= limit):  # Parquet can hold more than its size
        return _UNLIMITED if there is None else there, pieces
    documents = sum(piece.first for piece in pieces)
    return there or max(read, source.estimated_size(read, documents)), None


def divide(pieces: Iterable[Piece], rule: Rule) -> Iterator[Piece]:
    """Yield the pieces with their splits. A document may have units in both splits.

    Then each run of units in one split becomes a document of it. Text from both sides of a gap is never
    joined, so that each split has only text as it was written.
    """
    before = ""  # the split of the previous part, if it belongs to the same document
    for piece, units in _units(pieces, rule.longest):
        if piece.first:
            before = ""
        for held_out, run in groupby(units, key=lambda unit: unit[0] < rule.below):
            split = SPLITS[held_out]
            yield Piece("".join(text for _, text in run), split != before, piece.scored, split)
            before = split


def _units(pieces: Iterable[Piece], longest: int) -> Iterator[tuple[Piece, list[tuple[int, str]]]]:
    """Yield each piece with the hashes and texts of its units. All pieces of an example share one hash."""
    example: int | None = None
    for piece in pieces:
        if piece.first:
            example = None if piece.scored else _hash(piece.text)
        if example is not None:
            yield piece, [(example, piece.text)]
        else:
            characters = longest * len(piece.text) // len(piece.text.encode())
            units = enumerate(split_at_words(piece.text, max(2, characters)))
            yield piece, [(_hash(unit, number), unit) for number, unit in units]


def _hash(unit: str, number: int = 0) -> int:
    """The hash of a unit's text and of its number in the piece.

    With the number, a text that repeats one line is divided too.
    """
    text = f"{unit}{number}" if number else unit
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
