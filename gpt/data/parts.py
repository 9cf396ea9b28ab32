"""Choose what to read of a corpus: which parts of its files, which of their rows, which passages of a text.

Every choice is spread evenly. It depends only on an item's number and on the share that is taken, so a larger
share has all that a smaller one has.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from gpt.data.documents import Piece
from gpt.data.formats import Stretch
from gpt.text.tokenizer import split_at_words

T = TypeVar("T")
_FEWEST_PARTS = 8  # the fewest parts that are read, if the corpus has as many
_ORDERED = 8  # at least one in 8 rows of a part is taken
_PASSAGE = 1 << 13  # characters, the longest passage, where only a share of a text is read
_FEWEST_PASSAGES = 16  # the fewest passages in a part, if it has as many words
_GOLDEN_RATIO = (5**0.5 - 1) / 2


@dataclass(frozen=True)
class Selection:
    """The parts of a file that are read, and the share of their rows."""

    parts: list[int] | None = None
    """The numbers of the parts. None means all of the file, in order."""
    rows: float = 1.0
    """The share of the rows of these parts that is read."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing of the file is read."""
        return self.parts == []


def total_bytes(sizes: Sequence[Sequence[int]]) -> int | None:
    """Add the sizes, in bytes, of the parts of all files; None if a file has no parts."""
    return sum(map(sum, sizes)) if all(sizes) else None


def choose_parts(sizes: Sequence[Sequence[int]], most_bytes: int | None) -> list[Selection]:
    """Choose what to read of each file, given the bytes of its parts, for about `most_bytes` in all.

    If the size of one file is unknown (it has no parts), all files are read in order.
    """
    total = total_bytes(sizes)
    if most_bytes is None or total is None or most_bytes >= total:
        return [Selection()] * len(sizes)
    return _spread_over_parts([len(parts) for parts in sizes], most_bytes / total)


def _spread_over_parts(counts: Sequence[int], share: float) -> list[Selection]:
    """Take a share of all files, which have these numbers of parts.

    At least `_FEWEST_PARTS` parts are read. Where these are more than the share, only some of their rows are
    taken, but at least one in `_ORDERED`, as the rows of a part can only be read in order.
    """
    share_of_parts = min(1.0, max(share, _FEWEST_PARTS / sum(counts)))
    share_of_rows = max(share / share_of_parts, 1 / _ORDERED)
    selections = []
    before = 0  # parts of the earlier files
    for count in counts:
        chosen = [part for part in range(count) if evenly_spread(before + part) < share_of_parts]
        selections.append(Selection(chosen, share_of_rows))
        before += count
    return selections


def evenly_spread(number: int) -> float:
    """Map each number to a point in [0, 1). The points of consecutive numbers spread evenly (Weyl)."""
    return (number + 1) * _GOLDEN_RATIO % 1.0


def take_rows(rows: Iterable[T], weight: float, share: float) -> Iterator[T]:
    """Yield the rows of a file that has this weight, and a share of these."""
    if weight < 1.0:
        rows = (row for number, row in enumerate(rows) if _has_weight(number, weight))
    if share < 1.0:
        rows = (row for number, row in enumerate(rows) if evenly_spread(number) < share)
    return iter(rows)


def take_passages(stretches: Iterable[Stretch], weight: float) -> Iterator[Piece]:
    """Yield the text of a file that has this weight, as pieces.

    A passage that does not follow the one before begins a new document.
    """
    end: int | None = None  # the byte after the last passage
    for stretch in stretches:
        follows = stretch.begin == end
        for text, is_taken in _passages(stretch, weight):
            if is_taken and text:
                yield Piece(text, first=not follows)
            follows = is_taken and bool(text)
        end = stretch.end if follows else None


def _passages(stretch: Stretch, weight: float) -> list[tuple[str, bool]]:
    """Return the passages of a stretch, each with whether to take it.

    The choice does not depend on what else of the file is read.
    """
    if weight == 1.0:
        return [(stretch.text, True)]
    longest = min(_PASSAGE, len(stretch.text) // _FEWEST_PASSAGES + 2)
    texts = enumerate(split_at_words(stretch.text, longest), start=stretch.begin // _PASSAGE)
    return [(text, _has_weight(number, weight)) for number, text in texts]


def _has_weight(number: int, weight: float) -> bool:
    """Whether item `number` of a file with this weight is read. Item 0 always is."""
    return evenly_spread(number - 1) < weight
