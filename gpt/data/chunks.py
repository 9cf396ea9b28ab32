"""Choose what to read of a corpus: which chunks of its files, which of their rows, which pieces of a text.

Every choice is spread evenly. It depends only on an item's number and on the share that is taken, so a larger
share has all that a smaller one has.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from gpt.data.documents import Piece
from gpt.data.text_file import Chunk
from gpt.text.tokenizer import split_at_words

T = TypeVar("T")
_FEWEST_CHUNKS = 8  # the fewest chunks that are read, if the corpus has as many
_ORDERED = 8  # of the rows that are read, at least one in 8 is taken
_LONGEST_PIECE = 1 << 13  # characters, where only a share of a text is read
_FEWEST_PIECES = 16  # the fewest pieces of a chunk, if it has as many words
_GOLDEN_RATIO = (5**0.5 - 1) / 2


@dataclass(frozen=True)
class Selection:
    """The chunks of a file that are read, and the share of them that is taken."""

    chunks: list[int] | None = None
    """The numbers of the chunks. None means all of the file, in order."""
    share: float = 1.0
    """The share of the rows of these chunks, or of the pieces of a text, that is taken."""


def total_bytes(sizes: Sequence[Sequence[int]]) -> int | None:
    """Add the sizes, in bytes, of the chunks of all files; None if a file has no chunks."""
    return sum(map(sum, sizes)) if all(sizes) else None


def choose_chunks(sizes: Sequence[Sequence[int]], most_bytes: int | None) -> list[Selection]:
    """Choose what to read of each file, given the bytes of its chunks, for about `most_bytes` in all.

    If the size of one file is unknown (it has no chunks), all files are read in order.

    At least `_FEWEST_CHUNKS` chunks are read. Where these are more than the share, only a share of what they
    hold is taken. For example, a tenth of 400 chunks is 40 chunks. A tenth of 40 chunks would be 4, so 8
    chunks are read and half of each is taken. If there are 5 chunks, a tenth of each is taken.
    """
    total = total_bytes(sizes)
    if most_bytes is None or total is None or most_bytes >= total:
        return [Selection()] * len(sizes)
    share = most_bytes / total
    share_of_chunks = min(1.0, max(share, _FEWEST_CHUNKS / sum(map(len, sizes))))
    selections = []
    before = 0  # chunks of the earlier files
    for chunks in sizes:
        chosen = [chunk for chunk in range(len(chunks)) if _is_taken(before + chunk, share_of_chunks)]
        selections.append(Selection(chosen, share / share_of_chunks))
        before += len(chunks)
    return selections


def evenly_spread(number: int) -> float:
    """Map each number to a point in [0, 1). The points of consecutive numbers spread evenly (Weyl)."""
    return (number + 1) * _GOLDEN_RATIO % 1.0


def take_rows(rows: Iterable[T], weight: float, share: float) -> Iterator[T]:
    """Yield the rows that are taken of a file: by its weight, and of those only a share.

    At least one in `_ORDERED` is, as rows can only be read in order. The choice counts the rows of the chunks
    that are read, so it depends on which chunks these are.
    """
    if weight < 1.0:
        rows = (row for number, row in enumerate(rows) if _is_taken(number, weight))
    if share < 1.0:
        least = max(share, 1 / _ORDERED)
        rows = (row for number, row in enumerate(rows) if _is_taken(number, least))
    return iter(rows)


def take_text(chunks: Iterable[Chunk], share: float) -> Iterator[Piece]:
    """Yield this share of the text of some chunks, in pieces.

    A piece that does not follow the one before begins a new document.
    """
    end: int | None = None  # the byte after the last piece
    for chunk in chunks:
        follows = chunk.begin == end
        for text, is_taken in _pieces(chunk, share):
            if is_taken and text:
                yield Piece(text, first=not follows)
            follows = is_taken and bool(text)
        end = chunk.end if follows else None


def _pieces(chunk: Chunk, share: float) -> list[tuple[str, bool]]:
    """Return the text of a chunk in pieces, each with whether to take it.

    The choice does not depend on what else of the file is read.
    """
    if share == 1.0:
        return [(chunk.text, True)]
    longest = min(_LONGEST_PIECE, len(chunk.text) // _FEWEST_PIECES + 2)
    texts = enumerate(split_at_words(chunk.text, longest), start=chunk.begin // _LONGEST_PIECE)
    return [(text, _is_taken(number, share)) for number, text in texts]


def _is_taken(number: int, share: float) -> bool:
    """Whether item `number` is in this share of all items. Item 0 always is."""
    return evenly_spread(number - 1) < share
