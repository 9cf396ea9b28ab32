"""Decide which part of a corpus is held out. This happens only here, and from the text only.

The text is divided into units, and the units with the lowest hashes are held out. So equal documents are in
the same split. A unit is a document, or a piece of a long one. It has at most about a twentieth of the bytes
that are held out by default, or 1 KB if that is more. So some twenty units or more are held out of a text of
200 KB or more. In a tiny text, a unit has at most about the bytes that are held out. An example is never cut.
"""

import hashlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import NamedTuple

from gpt.data.chunks import evenly_spread
from gpt.data.corpus import Corpus
from gpt.data.documents import Piece
from gpt.errors import InputError
from gpt.progress import notice_once
from gpt.text.tokenizer import split_at_words

SPLITS = ("train", "val")
SAMPLE_BYTES = 32 << 20  # the most text in memory at once
LEARNED_BYTES = 8 << 20  # the text to learn a vocabulary from; a larger text gives more
_LEAST_LIMIT = 1 << 10  # bytes; the limit of a unit is no lower, except in a tiny text
_MUCH_MORE = 0.1  # of the text: if so much more is held out than was asked for, the user is told
_HASHES = 1 << 64


def held_out_bytes(size: float) -> float:
    """Return the bytes that are held out of a text of `size` bytes.

    It is a tenth up to one megabyte. For a longer text it is 100 times the square root of its bytes.
    """
    return min(size / 10, 100 * size**0.5)


@dataclass(frozen=True)
class Rule:
    """The choice of the units that are held out: those with a hash from `least` to below `below`."""

    longest: int
    """The most bytes of a unit. The unit is cut by characters, so a part of it with longer ones has more."""
    below: int
    """The lowest hash above those that are held out."""
    share: float
    """The share of the text that is held out. It is approximate unless all of the text was read."""
    least: int = 0
    """The lowest hash that is held out. Units with lower ones are too large, so they are passed over."""

    @classmethod
    def of(cls, size: int, val_fraction: float | None = None) -> "Rule":
        """Return the rule for a text of `size` bytes: it holds out this fraction of the hashes.

        The limit of a unit is that of the text that fits into memory. So chunks of a large text have the same
        units as all of it.
        """
        share = held_out_bytes(size) / max(size, 1) if val_fraction is None else val_fraction
        held_out = held_out_bytes(min(size, SAMPLE_BYTES))
        longest = max(held_out / 20, min(held_out, _LEAST_LIMIT), 1)
        return cls(int(longest), int(share * _HASHES), share)

    def exact(self, pieces: Iterable[Piece]) -> "Rule":
        """Return the rule for exactly these pieces.

        It holds out units in the order of their hashes, no more than its share. It begins with the first unit
        that is no larger than the share, and passes over those before it. The unit with the highest hash is
        left to train on. If all others are larger than the share, only the smallest unit of all is held out.
        Nothing is held out for a share of 0, or of a single unit.

        For example, units of 50, 5, 3, 9 and 31 bytes in the order of their hashes, and a share of 0.1: that
        is 9.8 bytes. The unit of 50 bytes is passed over, those of 5 and 3 are held out, and 9 do not fit.
        With a share of 0.02, which is 1.96 bytes, only the unit of 3 bytes is held out.
        """
        sizes: dict[int, int] = {}
        for _, units in _units(pieces, self.longest):
            for digest, text in units:
                sizes[digest] = sizes.get(digest, 0) + len(text.encode())
        total = max(1, sum(sizes.values()))
        most = self.share * total
        if not self.share or len(sizes) < 2:
            return Rule(self.longest, 0, 0.0)
        by_hash = sorted(sizes.items())
        begin = next((i for i, (_, size) in enumerate(by_hash[:-1]) if size <= most), None)
        if begin is None:
            smallest, held = min(by_hash, key=lambda unit: unit[1])
            return Rule(self.longest, smallest + 1, held / total, smallest)
        least, held = by_hash[begin]
        below = least + 1
        for digest, size in by_hash[begin + 1 : -1]:
            if held + size > most:
                break
            held += size
            below = digest + 1
        return Rule(self.longest, below, held / total, least)


@dataclass(frozen=True, kw_only=True, eq=False)
class Divided:
    """A corpus in two splits, `train` and `val`; `divide_corpus` makes it.

    It is made once and handed on: the plan measures it, the vocabulary is learned from it, and its pieces are
    tokenized.
    """

    source: Corpus
    stamps: list[object]
    """The files as they were before they were read, see `Corpus.stamps`."""
    val_fraction: float | None
    """The fraction to hold out that was asked for; None for the usual one."""
    most_bytes: int | None
    """The bytes to read of a longer text that were asked for; None for all of it."""
    limit: int | None
    """`most_bytes` if the text has more, as far as is known; None if all of the text is read."""
    size: int
    """The bytes of UTF-8 text in both splits. If they do not fit into memory, this is an estimate."""
    rule: Rule
    text: Sequence[Piece] | None = field(repr=False)
    """All pieces with their splits, if they fit into memory."""

    def pieces(self) -> Iterable[Piece]:
        """Return all pieces, in order."""
        if self.text is not None:
            return self.text
        return divide(self.source.pieces(self.most_bytes), self.rule)

    def sample(self) -> Iterable[Piece]:
        """Return all pieces of a text of up to `SAMPLE_BYTES`, and some chunks of a larger text.

        Then at least the share is held out that is in `pieces`, of the same units. What is `train` here is
        `train` in `pieces` too.
        """
        if self.text is not None:
            return self.text
        below = max(self.rule.below, Rule.of(SAMPLE_BYTES).below)
        return divide(self.source.pieces(SAMPLE_BYTES), replace(self.rule, below=below))

    def to_learn_from(self) -> list[str]:
        """Return text to learn a vocabulary from: chunks spread over the training text.

        A larger text gives more.
        """
        share = max(LEARNED_BYTES, self.size / 16) / max(1, min(self.size, SAMPLE_BYTES))
        train = (piece.text for piece in self.sample() if piece.split == "train")
        return [text for number, text in enumerate(train) if evenly_spread(number) < share]


def divide_corpus(
    source: Corpus, val_fraction: float | None = None, most_bytes: int | None = None
) -> Divided:
    """Divide a corpus. A text of up to `SAMPLE_BYTES` is read here, once and for all.

    Args:
        source: the corpus.
        val_fraction: the fraction of the text to hold out, by default as `held_out_bytes` says.
        most_bytes: read only about this many bytes of a longer text, see `Corpus.pieces`.

    Raises:
        InputError: `val_fraction` is outside [0, 1), or the corpus cannot be read.
    """
    if val_fraction is not None and not 0.0 <= val_fraction < 1.0:
        raise InputError(f"val_fraction must be in [0, 1), got {val_fraction}")
    stamps = source.stamps()  # before the text is read, so that a later change is noticed
    read = _read_what_fits(source, most_bytes)
    rule = Rule.of(read.size, val_fraction)
    text = None
    if read.pieces is not None:
        exact = rule.exact(read.pieces)
        text = list(divide(read.pieces, exact))
        if rule.share and not exact.below and text:
            why = "the text is a single document, or has a single prompt"
            notice_once(f"{source.files[0]}: nothing is held out, as {why}")
        if exact.share > rule.share + _MUCH_MORE:
            shares = f"{exact.share:.0%} of the text is held out, not {rule.share:.0%}"
            notice_once(f"{source.files[0]}: {shares}: no smaller part of it stays together")
        rule = exact
    return Divided(
        source=source,
        stamps=stamps,
        val_fraction=val_fraction,
        most_bytes=most_bytes,
        limit=read.limit,
        size=read.size,
        rule=rule,
        text=text,
    )


class _Read(NamedTuple):
    """The part of a corpus that is read."""

    pieces: list[Piece] | None
    """All pieces that are read, if they fit into memory."""
    size: int
    """Their bytes. If they do not fit into memory, this is an estimate."""
    limit: int | None
    """See `Divided.limit`."""


def _read_what_fits(source: Corpus, most_bytes: int | None) -> _Read:
    """Read a corpus, or `most_bytes` of it, if that fits into memory. Otherwise say how much it is.

    What fits has at most `SAMPLE_BYTES`. With a size that is known before reading, that of the files:

    | `most_bytes` | fits | pieces | size | limit |
    | --- | --- | --- | --- | --- |
    | none, or no less than the files have | yes | all | of these | None |
    | the same, but the text has more | yes | those that are read | of these | `most_bytes` |
    | less than the files have | yes | those that are read | of these | `most_bytes` |
    | less than the files have | no | None | `most_bytes` | `most_bytes` |
    | none, or no less than the files have | the files do not | None | of the files | None |
    | the same | only the text does not | None | of what fitted, so too small | `most_bytes` |

    The size of compressed files and of data sets of the hub is unknown before their end. It is estimated if
    reading stops before that, which it does only a little after the limit.
    """
    most = sys.maxsize if most_bytes is None else most_bytes
    total = source.size()
    if total is not None and min(total, most) > SAMPLE_BYTES:
        return _Read(None, min(total, most), most_bytes if most < total else None)
    pieces = list(source.pieces(min(SAMPLE_BYTES, most)))
    read = sum(len(piece.text.encode()) for piece in pieces)
    if total is None and read >= SAMPLE_BYTES and most > SAMPLE_BYTES:
        documents = sum(piece.first for piece in pieces)
        total = max(read, source.estimated_size(read, documents))
        return _Read(None, min(total, most), most_bytes if most < total else None)
    # Files can have more text than their size says. Parquet stores a repeated text once, and a template adds
    # to each example.
    if min(read, most) > SAMPLE_BYTES:
        return _Read(None, read, most_bytes)
    has_more = read >= most if total is None else most < total or read > most
    return _Read(pieces, read, most_bytes if has_more else None)


def divide(pieces: Iterable[Piece], rule: Rule) -> Iterator[Piece]:
    """Yield the pieces with their splits. A document may have units in both splits.

    Then each run of units in one split becomes a document of it. Text from both sides of a gap is never
    joined, so that each split has only text as it was written.
    """
    last_split = ""  # that of the previous unit, if it belongs to the same document
    for piece, units in _units(pieces, rule.longest):
        if piece.first:
            last_split = ""
        for held_out, adjacent in groupby(units, key=lambda unit: rule.least <= unit[0] < rule.below):
            split = "val" if held_out else "train"
            text = "".join(text for _, text in adjacent)
            yield piece._replace(text=text, first=split != last_split, split=split)
            last_split = split


def _units(pieces: Iterable[Piece], longest: int) -> Iterator[tuple[Piece, list[tuple[int, str]]]]:
    """Yield each piece with the hashes and texts of its units. All pieces of an example share one hash."""
    example: int | None = None
    for piece in pieces:
        if piece.first:
            example = _hash(piece.key) if piece.begins_example else None
        if example is not None:
            yield piece, [(example, piece.text)]
        else:
            characters = longest * len(piece.text) // len(piece.text.encode())
            units = enumerate(split_at_words(piece.text, max(2, characters)))
            yield piece, [(_hash(unit, number), unit) for number, unit in units]


def _hash(unit: str, number: int = 0) -> int:
    """Return the hash of a unit's text and of its number in the piece.

    With the number, a text that repeats one line is divided too.
    """
    text = f"{unit}{number}" if number else unit
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
