"""Read files as text or as rows: JSON lines, a JSON array, CSV, Parquet, or what comes with Python.

Text, JSON and CSV may be compressed.
Memory does not grow with the file. Text is read in parts, and rows one by one. The size of a row, and of a
value in it, is limited. The messages of InputErrors follow the file's name, which `named` puts before them.
"""

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import count, islice
from typing import Any, NamedTuple

from gpt.data import builtin
from gpt.errors import InputError

PART_BYTES = 1 << 18  # size of a part, which can be read without the parts before it

_FORMATS = {".json": "json", ".jsonl": "json", ".ndjson": "json", ".csv": "csv", ".tsv": "csv"}
_FORMATS |= {".parquet": "parquet"}
_DECOMPRESSED: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_LONGEST = 64 << 20  # bytes, the limit for a line of JSON, a field of CSV and a value of Parquet
_LONGEST_LINE = 1 << 16  # bytes; a longer line of text is cut up
_HEAD = 1 << 13  # bytes at the beginning that tell what a file is
_BLANKS = " \t\r\n"
_BETWEEN = re.compile(r"[\s,]*")  # what separates the values of an array
_LONGEST_LITERAL = 16  # characters; no JSON literal or escape, such as -Infinity, is longer
_JSON_ADVICE = "expected an object on each line, or one array of objects"
_WESTERN = 0.2  # in Western European text at most this share of the bytes is beyond ASCII
_UNDEFINED = frozenset(b"\x81\x8d\x8f\x90\x9d")  # bytes without a meaning in Windows-1252
_SAMPLED = 4 << 20  # decompressed bytes from which the size of the whole file is estimated
_BATCH = 256  # most rows of Parquet in memory at once
_BATCH_BYTES = 16 << 20  # and about the most bytes
_USUAL_DICTIONARY = 1 << 20  # bytes, the limit that programs that write Parquet use
_USUAL_RATIO = 10  # compression ratio

_BINARY = (  # endings of files without text
    *(".png", ".jpg", ".jpeg", ".gif", ".bmp", ".webp", ".ico", ".tif", ".tiff", ".heic", ".psd"),
    *(".mp3", ".wav", ".ogg", ".flac", ".m4a", ".mp4", ".mkv", ".avi", ".mov", ".webm"),
    *(".zip", ".tar", ".tgz", ".7z", ".rar", ".zst", ".jar", ".whl", ".deb", ".rpm", ".iso", ".dmg"),
    *(".pyc", ".pyo", ".pyd", ".class", ".o", ".a", ".so", ".dll", ".dylib", ".exe", ".wasm"),
    *(".pdf", ".docx", ".xlsx", ".pptx", ".odt", ".ods", ".epub", ".woff", ".woff2", ".ttf", ".otf"),
    *(".safetensors", ".pt", ".pth", ".npy", ".npz", ".gguf", ".onnx", ".pkl", ".sqlite"),
)
_MARKS = {  # byte order marks; a longer one comes before the shorter one that it begins with
    b"\xff\xfe\x00\x00": "utf-32",
    b"\x00\x00\xfe\xff": "utf-32",
    b"\xff\xfe": "utf-16",
    b"\xfe\xff": "utf-16",
}


class Row(NamedTuple):
    """A row and its place in the file."""

    number: int
    """The number of its line or row, counted from 1 at `position`."""
    value: Any
    """A dictionary of its columns, or the InputError that says why there is none."""
    position: int = 0
    """The byte of the file from which `number` counts."""


Choose = Callable[[Sequence[str]], Sequence[str]]
"""A function from the columns of a file to the columns that are read."""


def file_format(name: str) -> str:
    """The format by the name's ending: `text`, or rows in `json`, `csv`, `parquet`, `hub` or `builtin`."""
    if name.startswith(("hub:", "builtin:")):
        return name.partition(":")[0]
    stem, ending = os.path.splitext(name.lower())
    if ending in _DECOMPRESSED:
        ending = os.path.splitext(stem)[1]
    return _FORMATS.get(ending, "text")


def _opener(name: str) -> Any:
    """The function that opens a file; it decompresses the file if its ending says so."""
    return _DECOMPRESSED.get(os.path.splitext(name.lower())[1], open)


def is_compressed(name: str) -> bool:
    """Whether the file is compressed, according to its ending."""
    return _opener(name) is not open


@contextmanager
def named(name: str) -> Iterator[None]:
    """Turn every error into an InputError that names the file.

    All exceptions are caught, as those of decompression, protocols and pyarrow have no common class.
    """
    try:
        yield
    except InputError as error:
        raise InputError(f"{name} {error}") from None
    except RecursionError:
        raise InputError(f"{name} is nested too deeply") from None
    except Exception as error:
        line = str(error).strip().partition("\n")[0]
        raise InputError(f"cannot read {name} ({type(error).__name__}: {line})") from error


class Head(NamedTuple):
    """What the first 8 KB of a file, decompressed, tell about it."""

    encoding: str | None
    """The encoding that its byte order mark says, None without a mark or for UTF-8."""
    has_nul: bool
    is_array: bool
    """Whether it begins with a JSON array."""


def look(name: str) -> Head:
    """The `Head` of a file. It is cached until the file changes."""
    status = os.stat(name)
    return _look(name, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=1 << 14)
def _look(name: str, size: int, changed: int) -> Head:
    with _opener(name)(name, "rb") as file:
        data: bytes = file.read(_HEAD)
    encoding = next((encoding for mark, encoding in _MARKS.items() if data.startswith(mark)), None)
    text = data.decode(encoding or "utf-8", "ignore").lstrip("\ufeff" + _BLANKS)
    return Head(encoding, b"\0" in data, text.startswith("["))


def is_binary(name: str) -> bool:
    """Whether a file holds no text: by its ending, or a NUL byte in its first 8 KB. False for Parquet."""
    if file_format(name) not in ("text", "json", "csv"):
        return False
    if os.path.splitext(name)[1].lower() in _BINARY:
        return True
    try:
        start = look(name)
    except (OSError, EOFError, lzma.LZMAError):  # the error is reported when the file is read
        return False
    return start.has_nul and start.encoding is None


def binary_error(name: str) -> InputError:
    """The error for a binary file. It says so if the file seems to be UTF-16 without a byte order mark."""
    with _opener(name)(name, "rb") as file:
        data: bytes = file.read(_HEAD)
    for encoding, nul in (("UTF-16LE", data[1::2]), ("UTF-16BE", data[::2])):
        if nul and nul.count(0) > len(nul) / 2:
            return InputError(
                f"{name} seems to be {encoding} without a byte order mark: {convert(name, encoding)}"
            )
    return InputError(f"{name} is binary: expected text, JSON lines, a JSON array, CSV or Parquet")


@contextmanager
def _opened(name: str) -> Iterator[Any]:
    """Open a file as UTF-8 bytes, with `peek`. It is decompressed, and converted by its byte order mark."""
    with _opener(name)(name, "rb") as file:
        yield _as_utf8(name, file)


def _as_utf8(name: str, file: Any) -> Any:
    """The open file, or a reader that converts it to UTF-8 if its byte order mark says another encoding."""
    encoding = look(name).encoding
    return io.BufferedReader(_Utf8(file, encoding), PART_BYTES) if encoding else file


class _Utf8(io.RawIOBase):
    """A file in another encoding, read as UTF-8 bytes."""

    def __init__(self, file: Any, encoding: str) -> None:
        self._text = io.TextIOWrapper(file, encoding, newline="")
        self._left = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Read bytes into a buffer and return how many; 0 at the end of the file."""
        self._left = self._left or self._text.read(PART_BYTES).encode()
        size = min(len(buffer), len(self._left))
        buffer[:size] = self._left[:size]
        self._left = self._left[size:]
        return size


def part_sizes(name: str, choose: Choose) -> list[int]:
    """The size in bytes of each part of a file that can be read without the others.

    For Parquet the parts are the row groups, and the sizes are those of the chosen columns, uncompressed.
    The list is empty if the size is unknown before reading: the file is compressed, or on the hub.
    """
    kind = file_format(name)
    if kind == "builtin":
        return [sum(map(len, builtin.texts(name)))]
    if kind == "hub" or is_compressed(name):
        return []
    if kind == "parquet":
        from pyarrow.parquet import read_metadata

        with named(name):
            metadata = read_metadata(name)
            columns = choose(metadata.schema.to_arrow_schema().names)
        groups = map(metadata.row_group, range(metadata.num_row_groups))
        sizes = (sum(chunk.total_uncompressed_size for chunk in _chunks(group, columns)) for group in groups)
        return list(sizes) or [0]
    start = look(name)
    if start.encoding:
        return []
    size = os.stat(name).st_size
    if kind == "csv" or (kind == "json" and start.is_array):  # a line break need not end a row
        return [size]
    return [min(PART_BYTES, size - start) for start in range(0, max(1, size), PART_BYTES)]


def estimated_bytes(name: str) -> int:
    """Estimate a file's bytes, decompressed and in UTF-8, from its first 4 MB. A shorter one is exact."""
    size = os.stat(name).st_size
    read = 0
    with named(name), open(name, "rb") as raw:
        text = _as_utf8(name, _opener(name)(raw, "rb") if is_compressed(name) else raw)
        while read < _SAMPLED and (data := text.read(PART_BYTES)):
            read += len(data)
        return read if read < _SAMPLED else round(read * size / raw.tell())


class Stretch(NamedTuple):
    """Text of a file, and the bytes where it begins and ends."""

    begin: int
    end: int
    text: str


def read_text(name: str, parts: Iterable[int] | None, longest: int = _LONGEST_LINE) -> Iterator[Stretch]:
    """Yield the text of a file in parts. With `parts`, yield only the parts with these numbers.

    Part k begins with the first line that begins after byte k * PART_BYTES. If none begins within `longest`
    bytes, the line is cut there. Raises InputError if the text is not UTF-8.
    """
    with _opened(name) as file:
        position = 0
        for number in count() if parts is None else parts:
            begin = number * PART_BYTES
            end = (number + 1) * PART_BYTES
            if parts is not None and begin:
                position = file.seek(begin)
                position += len(_rest_of_line(file, longest))
            if position > end:  # a line that began earlier fills all of this part
                continue
            if not (data := file.read(end - position) + _rest_of_line(file, longest)):
                break
            try:
                text = data.decode()
            except UnicodeDecodeError as error:
                raise InputError(_not_utf8(name, data, error.start, position)) from None
            stop = position + len(data)
            yield Stretch(position, stop, text if position else text.removeprefix("\ufeff"))
            position = stop


def _rest_of_line(file: Any, longest: int) -> bytes:
    """Read the rest of a line, or about `longest` bytes of it, up to the end of a character."""
    data: bytes = file.readline(longest)
    for _ in range(3):
        if not data.endswith(b"\n") and (file.peek(1)[:1] or b"a")[0] & 0xC0 == 0x80:
            data += file.read(1)
    return data


def _not_utf8(name: str, data: bytes, place: int, position: int) -> str:
    """The message for text in another encoding. It gives the command that converts the text.

    It names Windows-1252 as the encoding where that is likely.
    """
    near = data[max(0, place - _HEAD) : place + _HEAD]
    foreign = sum(byte > 0x7F for byte in near)
    western = foreign < _WESTERN * len(near) and not _UNDEFINED.intersection(near)
    encoding = "WINDOWS-1252" if western else "ENCODING"
    return (
        f"is not UTF-8 text: byte {position + place} cannot be decoded; {convert(name, encoding)} converts it"
    )


def convert(name: str, encoding: str) -> str:
    """The command that converts a file to UTF-8."""
    stem, ending = os.path.splitext(name)
    return f"iconv -f {encoding} -t UTF-8 {shlex.quote(name)} > {shlex.quote(f'{stem}-utf8{ending}')}"


def read_rows(name: str, parts: Sequence[int] | None, choose: Choose) -> Iterator[Row]:
    """Yield the rows of a file, or only those of some of its parts. Of Parquet, read the chosen columns."""
    kind = file_format(name)
    if kind == "builtin":
        texts = enumerate(builtin.texts(name), start=1)
        yield from (Row(number, {"text": text}) for number, text in texts)
    elif kind == "parquet":
        yield from _parquet_rows(name, parts, choose)
    elif kind == "csv":
        lines = (line for stretch in read_text(name, None, _LONGEST) for line in io.StringIO(stretch.text))
        yield from _csv_rows(lines, "\t" if ".tsv" in name.lower() else ",")
    elif look(name).is_array:
        yield from _array_rows(stretch.text for stretch in read_text(name, None))
    else:
        for stretch in read_text(name, parts, _LONGEST):
            for number, line in enumerate(io.StringIO(stretch.text), start=1):
                if line.strip():
                    yield Row(number, _parsed(line), stretch.begin)


def place(name: str, row: Row) -> str:
    """The line or row number of a row, as an editor counts it, for messages."""
    if file_format(name) not in ("json", "csv"):
        return f"row {row.number}"
    lines = 0
    with _opened(name) as file:
        left = row.position
        while left and (data := file.read(min(left, PART_BYTES))):
            lines += data.count(b"\n")
            left -= len(data)
    return f"line {lines + row.number}"


def _parsed(line: str) -> Any:
    """The value of a line of JSON, or an InputError that says why it has none."""
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        return InputError(f"is no JSON, {error.msg} in column {error.colno}: {_JSON_ADVICE}")
    except RecursionError:
        return InputError("is nested too deeply")
    except ValueError as error:  # Python refuses to parse a number of thousands of digits
        return InputError(str(error))


def _array_rows(texts: Iterator[str]) -> Iterator[Row]:
    """Yield the values of a JSON array. A comma may follow the last one.

    A value that is not complete is parsed again with twice the text. So the time grows only with the file.
    """
    decode = json.JSONDecoder().raw_decode
    text = "".join(islice(texts, 1))
    at = text.index("[") + 1
    line = text.count("\n", 0, at) + 1
    while True:
        begin = _BETWEEN.match(text, at).end()  # type: ignore[union-attr]  # it matches nothing, too
        line += text.count("\n", at, begin)
        at = begin
        if text.startswith("]", at):
            if (text[at + 1 :] + "".join(islice(texts, 1))).strip():
                raise InputError(f"in line {line}: text follows the end of the array")
            return
        try:
            value, end = decode(text, at)
        except json.JSONDecodeError as error:
            more = _as_much(texts, len(text) - at) if _may_be_cut(error, text, at) else ""
            if not more:
                number = line + text.count("\n", at, error.pos)
                raise InputError(f"in line {number}: the array is no JSON, {error.msg}") from None
            text = text[at:] + more
            at = 0
            continue
        yield Row(line, value)
        line += text.count("\n", at, end)
        at = end


def _may_be_cut(error: json.JSONDecodeError, text: str, at: int) -> bool:
    """Whether the value is perhaps only incomplete, so that more text could make it valid."""
    at_end = error.pos > len(text) - _LONGEST_LITERAL or error.msg.startswith("Unterminated")
    return at_end and len(text) - at < _LONGEST


def _as_much(texts: Iterator[str], size: int) -> str:
    """Join the next texts until they have at least `size` characters, or there are no more."""
    found = []
    for text in texts:
        found.append(text)
        size -= len(text)
        if size <= 0:
            break
    return "".join(found)


# `csv` reads, as `datasets` and pyarrow guess types: they read the text `None` as missing, a date as a time.
def _csv_rows(lines: Iterable[str], separator: str) -> Iterator[Row]:
    """Yield the rows of CSV. Every value is text."""
    csv.field_size_limit(_LONGEST)
    reader = csv.DictReader(lines, delimiter=separator, strict=True)
    try:
        for row in reader:
            value = InputError("it has more values than the header") if None in row else row
            yield Row(reader.reader.line_num, value)
    except csv.Error as error:
        raise InputError(f"in line {reader.reader.line_num}: {error}") from None


def _parquet_rows(name: str, parts: Sequence[int] | None, choose: Choose) -> Iterator[Row]:
    """Yield the rows of some row groups. The larger the values, the fewer rows are in memory at once."""
    from pyarrow.parquet import ParquetFile, read_metadata

    metadata = read_metadata(name)
    columns = list(choose(metadata.schema.to_arrow_schema().names))
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    chunks = [_chunks(group, columns) for group in groups]
    repeated = {chunk.path_in_schema for group in chunks for chunk in group if _repeats_large_values(chunk)}
    chosen = range(len(groups)) if parts is None else parts
    # With other options, a whole row group would be in memory.
    mapped: dict[str, Any] = {"memory_map": True, "pre_buffer": False}
    with ParquetFile(name, metadata=metadata, read_dictionary=sorted(repeated), **mapped) as file:
        for group in chosen:
            number = sum(before.num_rows for before in groups[:group])
            size = sum(chunk.total_uncompressed_size for chunk in chunks[group])
            rows = min(_BATCH, max(1, _BATCH_BYTES * groups[group].num_rows // max(1, size)))
            for batch in file.iter_batches(rows, row_groups=[group], columns=columns):
                for value in arrow_rows(batch, columns):
                    number += 1
                    yield Row(number, value)


def arrow_rows(table: Any, columns: Sequence[str]) -> Iterator[dict[str, Any] | InputError]:
    """Yield the rows of an Arrow table as Python values, one at a time."""
    values = [table.column(name) for name in columns]
    for number in range(table.num_rows):
        row = {name: column[number].as_py() for name, column in zip(columns, values, strict=True)}
        large = [name for name, value in row.items() if isinstance(value, str) and len(value) > _LONGEST]
        yield InputError(f"column {large[0]!r} has more than {_LONGEST >> 20} MB") if large else row


def _chunks(group: Any, columns: Sequence[str]) -> list[Any]:
    """The metadata of some columns in a row group."""
    chunks = map(group.column, range(group.num_columns))
    return [chunk for chunk in chunks if any(f"{chunk.path_in_schema}.".startswith(f"{n}.") for n in columns)]


def _repeats_large_values(chunk: Any) -> bool:
    """Whether a column may repeat large values. Then each value is kept in memory once for all its rows."""
    if not chunk.has_dictionary_page or chunk.physical_type != "BYTE_ARRAY":
        return False
    dictionary = chunk.data_page_offset - chunk.dictionary_page_offset
    ratio = chunk.total_uncompressed_size / max(1, chunk.total_compressed_size)
    return bool(dictionary > _USUAL_DICTIONARY or ratio > _USUAL_RATIO)
