"""Files and URLs as text or rows: JSON, CSV, Parquet; plain or compressed.

Memory does not grow with a file: text is read in parts, rows one by one, and what must be whole, a line, a
value of JSON or a field of CSV, has a limit. InputErrors say what a file is, behind its name (`named`).
"""

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import count
from typing import IO, Any

from gpt.errors import InputError
from gpt.plain import shown

PART_BYTES = 1 << 18  # of a file, which can be read without what is before it
ROWS_AT_ONCE = 256  # of a table

_FORMATS = {".json": "json", ".jsonl": "json", ".ndjson": "json", ".csv": "csv", ".tsv": "csv"}
_FORMATS |= {".parquet": "parquet"}
_NOT_TEXT = {
    b"PK\x03\x04": "a zip archive or an office document",
    b"%PDF-": "a PDF",
    b"\x1f\x8b": "gzip data without the ending .gz",
    b"BZh": "bzip2 data without the ending .bz2",
    b"\xfd7zXZ\x00": "xz data without the ending .xz",
    b"\x28\xb5\x2f\xfd": "zstd data without the ending .zst",
    codecs.BOM_UTF16_LE: "UTF-16 or UTF-32",
    codecs.BOM_UTF16_BE: "UTF-16",
}
_LONGEST_LINE = 64 << 20  # bytes of a line, of a value in an array of JSON, of a field of CSV
_LOOKED_AT = 4096  # bytes
_LINE_END, _BLANK = re.compile(rb"(?<=\S)\n"), re.compile(rb"(?<=\S) ")
_BETWEEN_VALUES = re.compile(r"[\s,]*")


def is_url(name: str) -> bool:
    """Whether `name` has a protocol."""
    return re.match(r"[a-z][a-z0-9+.-]+://", name) is not None


def file_format(name: str) -> str:
    """`text`, or what the rows of a file are in: `json`, `csv`, `parquet`."""
    ending, packed = _endings(name)
    return _FORMATS.get(packed if ending in _DECOMPRESSED else ending, "text")


def is_compressed(name: str) -> bool:
    """Whether the file's ending is one of a compression."""
    return _endings(name)[0] in _DECOMPRESSED


def _endings(name: str) -> tuple[str, str]:
    """The last ending of a file's name and the one before it, in lower case, without a URL's query."""
    path = name.partition("?")[0] if is_url(name) else name
    stem, ending = os.path.splitext(path.lower())
    return ending, os.path.splitext(stem)[1]


def _open_zstd(file: IO[bytes]) -> io.BufferedReader:
    from pyarrow import CompressedInputStream  # zstandard's own reader does not report a truncated file

    return io.BufferedReader(CompressedInputStream(file, "zstd"))


_DECOMPRESSED: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _open_zstd}


@contextmanager
def _opened(name: str) -> Iterator[io.BufferedReader]:
    """The bytes at a path or URL, decompressed according to its ending."""
    import fsspec

    decompressed = _DECOMPRESSED.get(_endings(name)[0], nullcontext)
    found = fsspec.open(name, "rb") if is_url(name) else open(name, "rb", buffering=0)  # noqa: SIM115
    with found as file, decompressed(file) as plain, io.BufferedReader(plain, PART_BYTES) as reader:
        yield reader


@contextmanager
def named(name: str) -> Iterator[None]:
    """Have every error name the file: compressions, protocols and pyarrow share no class."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{name} {error}") from None
    except Exception as error:
        reason: BaseException = error
        while reason.__cause__ is not None:
            reason = reason.__cause__
        line = f"{type(reason).__name__}: {str(reason).strip().partition(chr(10))[0]}"
        advice = ": check the address and the network, or download the file by other means and give its path"
        raise InputError(f"cannot read {name} ({line}){advice if is_url(name) else ''}") from error


def part_count(name: str) -> int:
    """The parts of a local file that can be read without the others."""
    kind = file_format(name)
    if kind == "csv":  # a quotation has line breaks
        return 1
    if kind == "parquet":
        from pyarrow.parquet import ParquetFile

        return max(1, int(ParquetFile(name).num_row_groups))
    with _opened(name) as file:
        if kind == "json" and _is_array(file):
            return 1
    return max(1, -(-os.stat(name).st_size // PART_BYTES))


def read_text(name: str, errors: str, parts: Sequence[int] | None) -> Iterator[str]:
    """The text of a file in parts, or those of some numbers.

    Part k is the first in the bytes from k * PART_BYTES on, whichever other parts are read; it begins with a
    line, else with a word.
    """
    with _opened(name) as file:
        _check_text(file)
        data = b""
        for number in count() if parts is None else parts:
            if parts is not None:
                file.seek(number * PART_BYTES)
                data = b""
            data += file.read(PART_BYTES + _LOOKED_AT - len(data))
            if number and not data:
                break
            begin = word_start(data[:_LOOKED_AT]) if number else 0
            end = PART_BYTES + word_start(data[PART_BYTES:])
            yield _decoded(data[begin:end], errors, number * PART_BYTES + begin)
            data = data[PART_BYTES:]


def read_tables(name: str, errors: str, parts: Sequence[int] | None) -> Iterator[Any]:
    """The rows of a file: one by one as dictionaries, or of Parquet many at once in Arrow's batches."""
    with _opened(name) as file:
        kind = file_format(name)
        if kind == "parquet":
            from pyarrow.parquet import ParquetFile

            yield from ParquetFile(file).iter_batches(ROWS_AT_ONCE, row_groups=parts)
        elif kind == "csv":
            yield from _csv_rows(file, errors, "\t" if ".tsv" in _endings(name) else ",")
        else:
            yield from _json_rows(file, errors, parts)


# Not with `datasets`, which changes rows of files: the text `None` becomes no text, a date becomes a time.
def _csv_rows(file: io.BufferedReader, errors: str, separator: str) -> Iterator[dict[str, Any]]:
    """The rows of CSV, where every value is text."""
    csv.field_size_limit(_LONGEST_LINE)
    lines = (f"{line}\n" for line in _lines(file, errors))
    reader = csv.DictReader(lines, delimiter=separator, strict=True)
    try:
        for row in reader:
            if more := row.pop(None, []):  # values beyond those of the header
                raise csv.Error(f"expected {len(row)} values, got {len(row) + len(more)}")
            yield row
    except csv.Error as error:
        raise InputError(f"in line {reader.reader.line_num}: {error}") from None


def _json_rows(file: io.BufferedReader, errors: str, parts: Sequence[int] | None) -> Iterator[dict[str, Any]]:
    """The objects of JSON lines or of an array; a text stands for one with the column `text`."""
    found = _array(file, errors) if _is_array(file) else _objects(file, errors, parts)
    for where, value in found:
        row = {"text": value} if isinstance(value, str) else value
        if not isinstance(row, dict):
            raise InputError(f"in {where}: expected an object, got {shown(value)}")
        yield row


def _objects(file: io.BufferedReader, errors: str, parts: Sequence[int] | None) -> Iterator[tuple[str, Any]]:
    """The place and the value of each line that is not blank."""
    for number, line in enumerate(_lines(file, errors, parts), start=1):
        try:
            if line.strip():
                yield f"line {number}", json.loads(line)
        except ValueError as error:
            raise InputError(f"is not JSON from line {number} on: {error}") from None


def _is_array(file: io.BufferedReader) -> bool:
    return file.peek(_LOOKED_AT).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def _array(file: io.BufferedReader, errors: str) -> Iterator[tuple[str, Any]]:
    """The place and the value of each element, of which one at a time is in memory."""
    parse, decoder = json.JSONDecoder().raw_decode, codecs.getincrementaldecoder("utf-8")(errors)
    text, number = "", 0
    while file.read(1) != b"[":
        pass
    while block := file.read(max(PART_BYTES, len(text))):  # what is parsed again has doubled: in linear time
        text += decoder.decode(block)
        at = 0
        while True:
            begin = _BETWEEN_VALUES.match(text, at).end()  # type: ignore[union-attr]
            try:
                value, at = parse(text, begin)
            except ValueError:  # it ends in another block
                break
            number += 1
            yield f"value {number}", value
        text = text[begin:]
        if len(text) > _LONGEST_LINE:
            break
    if text.strip() != "]":
        limit = f"which may have {_LONGEST_LINE:,} characters"
        raise InputError(f"is not an array of JSON from value {number + 1} on, {limit}")


def _lines(file: io.BufferedReader, errors: str, parts: Sequence[int] | None = None) -> Iterator[str]:
    """The lines of a text file, or those that begin in some of its parts; an InputError for one too long."""
    _check_text(file)
    spans = [(part * PART_BYTES, (part + 1) * PART_BYTES) for part in parts or ()]
    for begin, end in spans or [(0, 1 << 62)]:
        if begin:  # to the end of the line before
            file.seek(begin - 1)
            begin += len(file.readline(_LONGEST_LINE)) - 1
        while begin < end and (line := file.readline(_LONGEST_LINE + 1)):
            if len(line) > _LONGEST_LINE:
                raise InputError(f"has a line of more than {_LONGEST_LINE:,} bytes, the limit")
            text = line.removesuffix(b"\n")
            yield _decoded(text if begin else text.removeprefix(codecs.BOM_UTF8), errors, begin)
            begin += len(line)


def _decoded(data: bytes, errors: str, position: int) -> str:
    """Text of a file from a position on; an InputError names the first byte that is not UTF-8."""
    try:
        return data.decode("utf-8", errors)
    except UnicodeDecodeError as error:
        raise InputError(
            f"is not UTF-8: byte {position + error.start} cannot be decoded; --errors replace (gpt fit: "
            "--data.errors replace) reads it with U+FFFD there"
        ) from error


def _check_text(file: io.BufferedReader) -> None:
    """An InputError for a file whose beginning is known not to be UTF-8 text."""
    head = file.peek(_LOOKED_AT)[:_LOOKED_AT]
    found = next((kind for magic, kind in _NOT_TEXT.items() if head.startswith(magic)), "")
    if head[257:262] == b"ustar":
        found = "a tar archive"
    elif 0.2 * len(head) < head.count(0) < 0.8 * len(head):
        found = "UTF-16 or UTF-32"
    if found:
        raise InputError(f"is {found}, expected UTF-8 text: unpack it, or save it as UTF-8")


def word_start(data: bytes, begin: int = 0, end: int | None = None) -> int:
    """Where text can be cut from `begin` to `end`: before the first line end, else blank, else character.

    A line end or a blank after another character always begins a word: both sides have the whole's tokens.
    """
    end = len(data) if end is None else end
    found = _LINE_END.search(data, begin, end) or _BLANK.search(data, begin, end)
    if found:
        return found.start()
    while begin < len(data) and data[begin] & 0xC0 == 0x80:  # inside of a character
        begin += 1
    return begin
