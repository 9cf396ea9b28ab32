"""What of a corpus is held out: decided here once, on the text; everything else reads both parts here.

A unit is a document, or of a longer one each part of at most a twentieth of what is held out, so that about
twenty units are held out at least. They are those with the lowest hashes: equal documents are on the same
side. An example is never cut up.
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
SAMPLE_BYTES = 32 << 20  # of text in memory at once
LEARNED_BYTES = 8 << 20
_LEAST_UNIT = 1 << 10  # bytes, where so much is held out
_HASHES = 1 << 64
_UNLIMITED = 1 << 62  # bytes


def held_out_bytes(size: float) -> float:
    """How much of a text is held out: a tenth up to a megabyte, of more 100 times the root of its bytes."""
    return min(size / 10, 100 * size**0.5)


@dataclass(frozen=True)
class Rule:
    """The most bytes of a unit, and the hash below which units are held out."""

    longest: int
    below: int
    share: float
    """Of the text that is held out, of all or, where not all of it was read, about."""

    @classmethod
    def of(cls, size: int, val_fraction: float | None = None) -> "Rule":
        """The rule for a text of `size` bytes. A part of a large text has the units of all of it."""
        usual = held_out_bytes(min(size, SAMPLE_BYTES))
        fraction = held_out_bytes(size) / max(size, 1) if val_fraction is None else val_fraction
        return cls(int(max(1, usual / 20, min(usual, _LEAST_UNIT))), int(fraction * _HASHES), fraction)

    def exact(self, pieces: Iterable[Piece]) -> "Rule":
        """The rule that holds out no more than its share of these pieces, and one unit of two at least."""
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
        val_fraction: the fraction of the text to hold out, by default what `held_out_bytes` says.
        most_bytes: of a longer text, read parts of about so many bytes in all, see `Corpus.pieces`.
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
        """`most_bytes`, if not all of the text is read."""
        self._all = pieces  # if it fits into memory
        self.size = min(most, there) if pieces is None else sum(len(piece.text.encode()) for piece in pieces)
        """Bytes of UTF-8 text in both parts, of a large text about so many."""
        self.rule = Rule.of(self.size, val_fraction)
        if pieces is not None:
            self.rule = self.rule.exact(pieces)
            self._all = list(divide(pieces, self.rule))

    def pieces(self) -> Iterable[Piece]:
        """All that is read, in order."""
        return self._all or divide(self.source.pieces(self.drawn), self.rule)

    def sample(self) -> Iterable[Piece]:
        """All of a text of up to `SAMPLE_BYTES`; of a larger one parts of it, of which more is held out.

        What is `train` here is `train` among `pieces` too.
        """
        if self._all:
            return self._all
        rule = max(self.rule, Rule.of(SAMPLE_BYTES), key=lambda rule: rule.below)
        return divide(self.source.pieces(SAMPLE_BYTES), rule)

    def to_learn_from(self) -> list[str]:
        """Text to learn a vocabulary from: parts of all that is trained on, more of a larger text."""
        share = max(LEARNED_BYTES, self.size / 16) / max(1, min(self.size, SAMPLE_BYTES))
        train = (piece.text for piece in self.sample() if piece.split == "train")
        return [text for number, text in enumerate(train) if evenly_spread(number) < share]


def _measure(source: Corpus, most: int) -> tuple[int, list[Piece] | None]:
    """About how many bytes there are, and what is read of them, at most so many, if it fits into memory."""
    known = source.size()
    if known is not None and min(known, most) > SAMPLE_BYTES:
        return known, None
    limit = min(most, SAMPLE_BYTES)
    pieces = list(source.pieces(limit))
    read = sum(len(piece.text.encode()) for piece in pieces)
    there = known
    if there is None and read < limit:
        there = read
    if most <= SAMPLE_BYTES or (there is not None and read <= limit):  # Parquet can hold more
        return _UNLIMITED if there is None else there, pieces
    documents = sum(piece.first for piece in pieces)
    return there or max(read, source.estimated_size(read, documents)), None


def divide(pieces: Iterable[Piece], rule: Rule) -> Iterator[Piece]:
    """The pieces with their splits: of a document in both, each run of units is a document there.

    What stood on both sides of a hole is never joined: the text of either split is text that was written.
    """
    before = ""  # the split of the part before, if it is of the same document
    for piece, units in _units(pieces, rule.longest):
        if piece.first:
            before = ""
        for held_out, run in groupby(units, key=lambda unit: unit[0] < rule.below):
            split = SPLITS[held_out]
            yield Piece("".join(text for _, text in run), split != before, piece.scored, split)
            before = split


def _units(pieces: Iterable[Piece], longest: int) -> Iterator[tuple[Piece, list[tuple[int, str]]]]:
    """Each piece with the hashes and the texts of its units; an example has one for all its pieces."""
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
    """By the text and, of parts of a piece, their number: a text that repeats one line is divided too."""
    text = f"{unit}{number}" if number else unit
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
