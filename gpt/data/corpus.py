"""A corpus: files, and how their documents are read. `gpt.data.find` finds one by its name."""

import math
import os
import platform
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from gpt.data.chunks import Selection, choose_chunks, take_rows, take_text, total_bytes
from gpt.data.columns import TEXT, choose_columns, lacks_columns
from gpt.data.documents import Piece, Tolerance, read_documents
from gpt.data.formats import file_format
from gpt.data.hub import HubDataSet
from gpt.data.read_errors import errors_named
from gpt.data.row import Row
from gpt.data.rows import chunk_sizes, read_rows
from gpt.data.text_file import CHUNK_BYTES, estimated_bytes, read_text
from gpt.errors import InputError, check_least
from gpt.plain import shown
from gpt.progress import counted
from gpt.text.template import DEFAULT_TEMPLATE, Template


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The files that documents come from, and how they are read: the fields of a corpus file.

    `data/README.md` describes these. Raises InputError for a value that cannot be used.
    """

    files: tuple[str, ...]
    """Paths, URLs, hub:OWNER/NAME, builtin:NAME; URLs are downloaded by `find_corpus`."""
    subset: str | None = None
    revision: str | None = None
    """The commit of a data set of the hub. Without one, the newest is read, and what was prepared before is
    still taken after the data set has changed."""
    sha256: tuple[str, ...] = ()
    """The hash of each file in hexadecimal, or none. A file with another hash is an InputError."""
    weights: tuple[float, ...] = ()
    """The share of each file to read, above 0 and at most 1. Without weights, all of every file is read."""
    text_column: str = TEXT
    template: Template = DEFAULT_TEMPLATE
    skip_bad_rows: int = 0
    """How many rows that cannot be used may be left out, of all files together."""

    def __post_init__(self) -> None:
        check_least(0, skip_bad_rows=self.skip_bad_rows)
        if self.sha256 and len(self.sha256) != len(self.files):
            raise InputError(f"sha256 has {self._for_files(self.sha256)}")
        self._check_weights()
        if wrong := [value for value in self.sha256 if not re.fullmatch("[0-9a-f]{64}", value)]:
            raise InputError(f"sha256 is {shown(wrong[0])}, expected 64 hexadecimal digits in lower case")

    def _check_weights(self) -> None:
        if not self.weights:
            return
        if len(self.weights) != len(self.files):
            raise InputError(f"weights has {self._for_files(self.weights)}")
        if wrong := [weight for weight in self.weights if not 0.0 < weight <= 1.0]:
            raise InputError(
                f"weights has {shown(wrong[0])}, expected the share of a file that is read, above 0 and at "
                "most 1: give the other files smaller ones"
            )
        if len(set(self.files)) < len(self.files):  # two shares of the same file would overlap
            raise InputError("a file is named twice: name each once where there are weights")

    def _for_files(self, values: Sequence[object]) -> str:
        return f"{counted(len(values), 'value')} for {counted(len(self.files), 'file')}"

    @property
    def _weight_of_each(self) -> tuple[float, ...]:
        """The weight of each file, 1 by default."""
        return self.weights or (1.0,) * len(self.files)

    @cached_property
    def _chunk_sizes(self) -> list[list[int]]:
        """The bytes to read of each chunk of each file: the chunk's size times the file's weight."""
        sizes_of_files = []
        for name, weight in zip(self.files, self._weight_of_each, strict=True):
            sizes = chunk_sizes(name, partial(self._choose, name))
            sizes_of_files.append([math.ceil(weight * size) for size in sizes])
        return sizes_of_files

    @cached_property
    def _data_sets(self) -> dict[str, HubDataSet]:
        """The data sets of the hub, by their names in `files`."""
        names = [name for name in self.files if file_format(name) == "hub"]
        return {name: HubDataSet(name.removeprefix("hub:"), self.subset, self.revision) for name in names}

    def size(self) -> int | None:
        """Return the bytes to read in all; None if unknown before: files are compressed, or on the hub."""
        return total_bytes(self._chunk_sizes)

    def estimated_size(self, read: int, documents: int) -> int:
        """Estimate the bytes of text in all, given that the first `documents` documents had `read` bytes."""
        per_document = read / max(1, documents)
        return sum(
            sum(sizes) or math.ceil(weight * self._estimate(name, per_document))
            for name, weight, sizes in zip(self.files, self._weight_of_each, self._chunk_sizes, strict=True)
        )

    def _estimate(self, name: str, bytes_per_document: float) -> int:
        if name in self._data_sets:
            return self._data_sets[name].estimated_bytes(bytes_per_document)
        return estimated_bytes(name)

    def stamps(self) -> list[object]:
        """Return, for each file, a value that changes when the file does.

        For a file on disk these are its size, its time of change and its inode number. For Python's own text
        it is Python's version. For a hub data set it is None.
        """
        return [_stamp(name) for name in self.files]

    def pieces(self, most_bytes: int | None = None) -> Iterator[Piece]:
        """Yield the documents in order, in pieces. `most_bytes` limits their size, approximately.

        With `most_bytes`, only some chunks are read, spread evenly over all files. A larger `most_bytes` adds
        chunks to those of a smaller one. If these are few, only some pieces of their text are taken, or some
        of their rows: at least an eighth, as all have to be read, because each shows where the next one
        begins. If the size of a file is unknown, because it is compressed, all files are read from the
        beginning. A file's weight below 1 leaves out the same pieces of a text each time, and the same rows
        each time with the same `most_bytes`.

        Raises InputError for a file that cannot be read, and for more bad rows than `skip_bad_rows`.
        """
        # The chosen chunks have about `most_bytes` where their sizes are known. This limit ends the reading
        # of others, of files with more text than their sizes say, and where an eighth of the rows is more.
        limit = math.inf if most_bytes is None else most_bytes + CHUNK_BYTES
        read = 0
        is_example = False
        tolerance = Tolerance(self.skip_bad_rows)
        selections = choose_chunks(self._chunk_sizes, most_bytes)
        for name, weight, selection in zip(self.files, self._weight_of_each, selections, strict=True):
            with errors_named(name):
                for piece in self._pieces(name, weight, selection, tolerance):
                    if piece.first:
                        is_example = piece.begins_example
                    may_end = piece.first or not is_example  # a prompt without its reply is no example
                    if may_end and read >= limit:
                        tolerance.tell()
                        return
                    read += len(piece.text.encode())
                    yield piece
        tolerance.tell()

    def _pieces(
        self, name: str, weight: float, selection: Selection, tolerance: Tolerance
    ) -> Iterator[Piece]:
        """Yield the pieces of one file: of the selected chunks, what its weight leaves."""
        if selection.chunks == []:  # not even a file that can only be read in order
            return
        if file_format(name) == "text":
            yield from take_text(read_text(name, selection.chunks), weight * selection.share)
            return
        rows = take_rows(self._rows(name, selection.chunks), weight, selection.share)
        yield from read_documents(name, rows, self.text_column, self.template, tolerance)

    def _rows(self, name: str, chunks: list[int] | None) -> Iterator[Row]:
        if name in self._data_sets:
            return self._data_sets[name].rows(partial(self._choose, name))
        return read_rows(name, chunks, partial(self._choose, name))

    def _choose(self, name: str, present: Sequence[str]) -> list[str]:
        """Return the columns of a file to read, and tell the user how.

        Only here all columns of Parquet and of a data set are known, as the others are not read. Raises
        InputError if a needed one is not present.
        """
        columns = choose_columns(name, self.text_column, present)
        if columns is None:
            raise lacks_columns(self.text_column, present)
        return [column for column in columns.names if column in present]


def _stamp(name: str) -> object:
    kind = file_format(name)
    if kind == "builtin":
        return platform.python_version()
    if kind == "hub":
        return None
    status = os.stat(name)
    return status.st_size, status.st_mtime_ns, status.st_ino
