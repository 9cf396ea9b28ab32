"""Files as text or rows: JSON lines, CSV, Parquet, what comes with Python; plain or compressed.

Memory does not grow with a file: text is read in parts, rows one by one, and what must be whole, a line of
JSON or a field of CSV, has a limit. InputErrors say what a file is, behind its name (`named`).
"""

import bz2
import csv
import gzip
import io
import json
import lzma
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

from gpt.data import builtin
from gpt.errors import InputError

PART_BYTES = 1 << 18  # of a file, which can be read without what is before it

_FORMATS = {".json": "json", ".jsonl": "json", ".ndjson": "json", ".csv": "csv", ".tsv": "csv"}
_FORMATS |= {".parquet": "parquet"}
_DECOMPRESSED: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_LONGEST = 64 << 20  # bytes of a row: of a line of JSON, a field of CSV
_LONGEST_LINE = 1 << 16  # bytes of a line of text that is not cut up


def file_format(name: str) -> str:
    """`text`, or what rows are in: `json`, `csv`, `parquet`, `hub`, `builtin`."""
    if name.startswith(("hub:", "builtin:")):
        return name.partition(":")[0]
    stem, ending = os.path.splitext(name.lower())
    if ending in _DECOMPRESSED:
        ending = os.path.splitext(stem)[1]
    return _FORMATS.get(ending, "text")


def _opener(name: str) -> Any:
    """What opens a file, or decompresses it according to its ending."""
    return _DECOMPRESSED.get(os.path.splitext(name.lower())[1], open)


@contextmanager
def named(name: str) -> Iterator[None]:
    """Have every error name the file: compressions, protocols and pyarrow share no class."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{name} {error}") from None
    except Exception as error:
        line = str(error).strip().partition("\n")[0]
        raise InputError(f"cannot read {name} ({type(error).__name__}: {line})") from error


def part_sizes(name: str) -> list[int]:
    """The bytes of the parts of a file that can be read without the others, of Parquet uncompressed.

    None of what has to be read to know its size.
    """
    kind = file_format(name)
    if kind == "hub" or _opener(name) is not open:
        return []
    if kind == "builtin":
        return [sum(map(len, builtin.texts(name)))]
    if kind == "parquet":
        from pyarrow.parquet import read_metadata

        with named(name):
            found = read_metadata(name)
        return [found.row_group(number).total_byte_size for number in range(found.num_row_groups)]
    size = os.stat(name).st_size
    if kind == "csv":  # a quotation has line breaks
        return [size]
    return [min(PART_BYTES, size - start) for start in range(0, max(1, size), PART_BYTES)]


def read_text(name: str, parts: Iterable[int] | None, longest: int = _LONGEST_LINE) -> Iterator[str]:
    """The text of a file in parts, or those of some numbers, which are the same.

    Part k begins with the first line after k * PART_BYTES, where one does in the next `longest` bytes.
    """
    with _opener(name)(name, "rb") as file:
        position = 0
        for number in count() if parts is None else parts:
            begin = number * PART_BYTES
            end = (number + 1) * PART_BYTES
            if parts is not None and begin:
                position = file.seek(begin)
                position += len(_rest_of_line(file, longest))
            if position > end:  # all of it is of a line before
                continue
            if not (data := file.read(end - position) + _rest_of_line(file, longest)):
                break
            try:
                text = data.decode()
            except UnicodeDecodeError as error:
                place = position + error.start
                advice = "cannot be decoded; iconv converts it"
                raise InputError(f"is not UTF-8 text: byte {place} {advice}") from None
            yield text if position else text.removeprefix("\ufeff")
            position += len(data)


def _rest_of_line(file: Any, longest: int) -> bytes:
    """What is left of a line, or `longest` bytes of it to the end of a character."""
    data: bytes = file.readline(longest)
    for _ in range(3):
        if not data.endswith(b"\n") and (file.peek(1)[:1] or b"a")[0] & 0xC0 == 0x80:
            data += file.read(1)
    return data


def read_rows(name: str, parts: Sequence[int] | None) -> Iterator[dict[str, Any]]:
    """The rows of a file, or those in some of its parts."""
    kind = file_format(name)
    if kind == "builtin":
        yield from ({"text": text} for text in builtin.texts(name))
        return
    if kind == "parquet":
        from pyarrow.parquet import ParquetFile

        for batch in ParquetFile(name).iter_batches(256, row_groups=parts):
            yield from batch.to_pylist()
        return
    parts = None if kind == "csv" else parts
    lines = (line for text in read_text(name, parts, _LONGEST) for line in io.StringIO(text))
    if kind == "csv":
        yield from _csv_rows(lines, "\t" if ".tsv" in name.lower() else ",")
    else:
        for number, line in enumerate(lines, start=1):
            try:
                if line.strip():
                    yield json.loads(line)
            except json.JSONDecodeError as error:
                raise InputError(f"is not JSON lines, see line {number}: {error}") from None


# Not with `datasets` or pyarrow, which guess types: the text `None` becomes no text, a date becomes a time.
def _csv_rows(lines: Iterable[str], separator: str) -> Iterator[dict[str, Any]]:
    """The rows of CSV, where every value is text."""
    csv.field_size_limit(_LONGEST)
    reader = csv.DictReader(lines, delimiter=separator, strict=True)
    try:
        for row in reader:
            if None in row:
                raise csv.Error("it has more values than the header")
            yield row
    except csv.Error as error:
        raise InputError(f"in line {reader.reader.line_num}: {error}") from None
