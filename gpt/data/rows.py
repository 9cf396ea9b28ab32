"""Read a file as rows: JSON lines, a JSON array, CSV, Parquet, or what comes with Python.

Rows are read one by one, so memory does not grow with the file. The size of a row, and of a value in it, is
limited.
"""

import csv
import io
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from gpt.data import builtin
from gpt.data.formats import ending_of, file_format
from gpt.data.json_array import array_rows
from gpt.data.parquet import group_sizes, parquet_rows
from gpt.data.read_errors import errors_named
from gpt.data.row import LONGEST_VALUE, Choose, Row, check_named_once
from gpt.data.text_file import CHUNK_BYTES, Chunk, head_of, is_compressed, opened, read_text
from gpt.errors import InputError
from gpt.plain import Json

_QUOTED_NAME = re.compile(r'(?:^|(?<=[,;\t ]))"(?:[^"]|"")*"?')  # in the header of CSV
_EXCELS_LINE = re.compile(r'"?sep=([,;\t|])"?\s*')
_JSON_ADVICE = "expected an object on each line, or one array of objects"


def chunk_sizes(name: str, choose: Choose) -> list[int]:
    """Return the size in bytes of each chunk of a file, which can be read without the others.

    For Parquet the chunks are the row groups, and the sizes are those of the chosen columns, uncompressed.
    The list is empty if the size is unknown before reading: the file is compressed, or on the hub.
    """
    kind = file_format(name)
    if kind == "builtin":
        return [sum(map(len, builtin.texts(name)))]
    if kind == "hub" or is_compressed(name):
        return []
    if kind == "parquet":
        with errors_named(name):
            return group_sizes(name, choose) or [0]
    head = head_of(name)
    if head.encoding:
        return []
    size = os.stat(name).st_size
    if kind == "text" or (kind == "json" and not head.is_array):  # it can be cut at any line break
        return [min(CHUNK_BYTES, size - begin) for begin in range(0, max(1, size), CHUNK_BYTES)]
    return [size]


def read_rows(name: str, chunks: Sequence[int] | None, choose: Choose) -> Iterator[Row]:
    """Yield the rows of a file, or only those of some of its chunks. Of Parquet, read the chosen columns."""
    kind = file_format(name)
    if kind == "builtin":
        texts = enumerate(builtin.texts(name), start=1)
        yield from (Row(number, {"text": text}) for number, text in texts)
    elif kind == "parquet" and is_compressed(name):
        raise InputError("is compressed Parquet: decompress it. Parquet is compressed inside")
    elif kind == "parquet":
        yield from parquet_rows(name, chunks, choose)
    elif kind == "csv":
        csv_chunks = read_text(name, None, LONGEST_VALUE)
        lines = (line for chunk in csv_chunks for line in io.StringIO(chunk.text))
        yield from _csv_rows(lines, "\t" if ending_of(name) == ".tsv" else ",;\t", choose)
    elif head_of(name).is_array:
        yield from array_rows(chunk.text for chunk in read_text(name, None))
    else:
        yield from _json_lines(read_text(name, chunks, LONGEST_VALUE))


def position_of(name: str, row: Row) -> str:
    """Return the line or row number of a row, as an editor counts it, for messages."""
    if file_format(name) not in ("json", "csv"):
        return f"row {row.number}"
    lines = 0
    with opened(name) as file:
        left = row.position
        while left:
            data = file.read(min(left, CHUNK_BYTES))
            if not data:
                break
            lines += data.count(b"\n")
            left -= len(data)
    return f"line {lines + row.number}"


def _json_lines(chunks: Iterable[Chunk]) -> Iterator[Row]:
    """Yield the rows of JSON lines. A line that is too long comes in several chunks, and is one bad row."""
    cut_at = -1  # the byte where a line was cut
    for chunk in chunks:
        begins_within_line = chunk.begin == cut_at
        for number, line in enumerate(io.StringIO(chunk.text), start=1):
            # The last line of a file may have no end. If it is shorter, it is not cut.
            is_cut = not line.endswith("\n") and len(line.encode()) >= LONGEST_VALUE
            if is_cut:
                cut_at = chunk.end
            if begins_within_line and number == 1:
                continue  # the row was yielded where it began
            if is_cut:
                yield Row(number, InputError(f"has more than {LONGEST_VALUE >> 20} MB"), chunk.begin)
            elif line.strip():
                yield Row(number, _parsed(line), chunk.begin)


def _parsed(line: str) -> Json:
    """Return the value of a line of JSON, or an InputError that says why it has none."""
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        return InputError(f"is no JSON, {error.msg} in column {error.colno}: {_JSON_ADVICE}")
    except RecursionError:
        return InputError("is nested too deeply")
    except ValueError as error:  # Python refuses to parse a number of thousands of digits
        return InputError(str(error))


# `csv` reads, as `datasets` and pyarrow guess types: they read the text `None` as missing, a date as a time.
def _csv_rows(lines: Iterator[str], separators: str, choose: Choose) -> Iterator[Row]:
    """Yield the rows of CSV. Every value is text. Raises InputError if two chosen columns have the same name.

    The header decides: the first of the separators that it has outside of quotes separates the values. If
    blanks follow the separator there, they are skipped in all rows. Empty lines may precede the header, and a
    line such as `sep=;`, with which Excel names the separator.
    """
    csv.field_size_limit(LONGEST_VALUE)
    before = 0  # lines before the header
    header = next(lines, "")
    while header and (not header.strip() or _EXCELS_LINE.fullmatch(header)):
        if named := _EXCELS_LINE.fullmatch(header):
            separators = named[1]
        before += 1
        header = next(lines, "")
    unquoted = _QUOTED_NAME.sub("", header)
    separator = next((one for one in separators if one in unquoted), separators[0])
    reader = csv.DictReader(
        chain([header], lines),
        delimiter=separator,
        skipinitialspace=f"{separator} " in unquoted,
        strict=True,
    )
    try:
        for number, row in enumerate(reader):
            if number == 0:
                names = list(reader.fieldnames or ())
                check_named_once(choose(names), names)
            value = InputError("it has more values than the header") if None in row else row
            yield Row(before + reader.reader.line_num, value)
    except csv.Error as error:
        raise InputError(f"in line {before + reader.reader.line_num}: {error}") from None
