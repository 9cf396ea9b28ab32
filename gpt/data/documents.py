"""From files, URLs and rows to documents, piece by piece: text, JSON, CSV, Parquet; plain or compressed.

Memory does not grow with a file: text is read in parts, rows one by one, and what must be whole, a line, a
value of JSON or a field of CSV, has a limit.
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
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain, islice
from typing import IO, Any, NamedTuple

from gpt.errors import InputError
from gpt.text.template import Part, Template
from gpt.text.tokenizer import split_at_words, whole_characters

LONGEST_PIECE = 1 << 20  # characters
PART_BYTES = 1 << 18  # of a file, which can be read without what is before it

_ENDINGS = {"json": (".json", ".jsonl", ".ndjson"), "csv": (".csv", ".tsv"), "parquet": (".parquet",)}
_NOT_TEXT = {
    b"PK\x03\x04": "a zip archive or an office document",
    b"%PDF-": "a PDF",
    b"\x1f\x8b": "gzip data without the ending .gz",
    b"BZh": "bzip2 data without the ending .bz2",
    b"\xfd7zXZ\x00": "xz data without the ending .xz",
    b"\x28\xb5\x2f\xfd": "zstd data without the ending .zst",
    codecs.BOM_UTF16_LE: "UTF-16 or UTF-32",
    codecs.BOM_UTF16_BE: "UTF-16",
    codecs.BOM_UTF32_BE: "UTF-32",
}
Document = list[Part]  # a text in one part, or an example in several; one that is left out has none
MESSAGES = "messages"
_EXAMPLES = [MESSAGES], ["prompt", "completion"]

_ROWS_AT_ONCE = 256
_LONGEST_LINE = 64 << 20  # bytes of a line, of a value in an array of JSON, of a field of CSV
_LOOKED_AT = 4096  # bytes
_LINE_END, _BLANK = re.compile(rb"(?<=\S)\n"), re.compile(rb"(?<=\S) ")
_BETWEEN_VALUES = re.compile(r"[\s,]*")


class Piece(NamedTuple):
    """A document or a part of one."""

    text: str
    first: bool = True
    last: bool = True  # `<|endoftext|>` follows it, also inside a conversation
    scored: bool = True  # a model learns to write it; of an example, the first piece is not
    split: str = ""  # `train` or `val`, see `gpt.data.split`


def file_pieces(
    name: str, column: str, errors: str, template: Template, parts: Sequence[int] | None = None
) -> Iterator[Piece]:
    """The documents of a file or URL, the text or each row: all, or those in parts of its `part_count`."""
    with _named(name):
        if file_format(name) == "text":
            yield from _text(name, errors, parts)
        else:
            yield from cut(_documents(_tables(name, errors, parts), column, name, template))


def part_count(name: str) -> int:
    """The parts of a local file that can be read without the others."""
    kind = file_format(name)
    if is_compressed(name) or kind == "csv":  # a quotation in CSV has line breaks
        return 1
    with _named(name):
        if kind == "parquet":
            from pyarrow.parquet import ParquetFile

            return max(1, int(ParquetFile(name).num_row_groups))
        if kind == "json":
            with _opened(name) as file:
                if _is_array(file):
                    return 1
        return max(1, -(-os.stat(name).st_size // PART_BYTES))


def hub_rows(
    column: str, template: Template, path: str, subset: str | None, **options: Any
) -> Iterator[Document]:
    """The documents of a Hugging Face data set; the options are `load_dataset`'s."""
    from datasets import load_dataset

    with _named(path):
        tables = load_dataset(path, subset, **options).with_format("arrow").iter(batch_size=_ROWS_AT_ONCE)
        yield from _documents(tables, column, path, template)


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Turn any error into one that names the file: compressions, protocols and pyarrow share no class."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        reason: BaseException = error
        while reason.__cause__ is not None:
            reason = reason.__cause__
        line = f"{type(reason).__name__}: {str(reason).strip().partition(chr(10))[0]}"
        advice = ": check the address and the network, or download the file by other means and give its path"
        kind = file_format(name)
        what = name if kind == "text" or is_url(name) else f"{name} as {kind}"
        raise InputError(f"cannot read {what} ({line}){advice if is_url(name) else ''}") from error


def join(rows: Iterable[Document], starts: str) -> Iterator[Document]:
    """Documents from rows of text: one that matches the expression `starts` begins a document."""
    document: list[str] = []
    for row in rows:
        if [scored for _, scored in row] != [True]:
            raise InputError("document_starts joins rows of text, these are examples")
        if document and re.match(starts, row[0].text):
            yield [Part("".join(document), True)]
            document = []
        document.append(row[0].text)
    if document:
        yield [Part("".join(document), True)]


def cut(documents: Iterable[Document]) -> Iterator[Piece]:
    """Documents cut into pieces; an example without parts is one without text."""
    for document in documents:
        first = True
        for text, scored in document or [Part("", False)]:
            *others, end = list(split_at_words(whole_characters(text), LONGEST_PIECE)) or [""]
            for part in others:
                yield Piece(part, first, False, scored)
                first = False
            yield Piece(end, first, scored or not document, scored)
            first = False


def _text(name: str, errors: str, parts: Sequence[int] | None) -> Iterator[Piece]:
    """A text file as one document, without the parts that are not to be read."""
    text, first = "", True
    with _opened(name) as file:
        _check_text(file, name)
        for number, (position, data) in enumerate(_byte_parts(file, parts)):
            if number:
                yield Piece(text, first, last=False)
                first = False
            text = _decoded(data, errors, name, position)
    yield Piece(text, first)


def _byte_parts(file: IO[bytes], parts: Sequence[int] | None) -> Iterator[tuple[int, bytes]]:
    """Position and bytes of parts of a file, by number or all; each begins with a line, else with a word.

    Of part k that is the first in the bytes from k * PART_BYTES on, whichever other parts are read.
    """
    for number in parts or ():
        file.seek(number * PART_BYTES)
        data = file.read(PART_BYTES + _LOOKED_AT)
        begin = word_start(data[:_LOOKED_AT]) if number else 0
        end = PART_BYTES + word_start(data[PART_BYTES:])
        yield number * PART_BYTES + begin, data[begin:end]
    if parts is not None:
        return
    rest, position = b"", 0
    while block := file.read(PART_BYTES):
        end = word_start(block[:_LOOKED_AT]) if rest else 0
        if rest:
            yield position, rest + block[:end]
            position += len(rest) + end
        rest = block[end:]
    yield position, rest


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


def _json_rows(name: str, errors: str, parts: Sequence[int] | None) -> Iterator[dict[str, Any]]:
    """The objects of JSON lines or of an array; a text stands for one with the column `text`."""
    with _opened(name) as file:
        found = _array(file, name, errors) if _is_array(file) else _objects(file, name, errors, parts)
        for where, value in found:
            row = {"text": value} if isinstance(value, str) else value
            if not isinstance(row, dict):
                raise InputError(f"{name}, {where}: expected an object, got {reprlib.repr(value)}")
            yield row


def _objects(
    file: IO[bytes], name: str, errors: str, parts: Sequence[int] | None
) -> Iterator[tuple[str, Any]]:
    """The place and the value of each line that is not blank."""
    for number, line in enumerate(_lines(file, name, errors, parts), start=1):
        try:
            if line.strip():
                yield f"line {number}", json.loads(line)
        except ValueError as error:
            raise InputError(f"{name} is not JSON from line {number} on: {error}") from None


def _is_array(file: io.BufferedReader) -> bool:
    return file.peek(_LOOKED_AT).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def _array(file: io.BufferedReader, name: str, errors: str) -> Iterator[tuple[str, Any]]:
    """The place and the value of each element, of which one at a time is in memory."""
    parse, decoder = json.JSONDecoder().raw_decode, codecs.getincrementaldecoder("utf-8")(errors)
    text, number, wanted = "", 0, 0
    while file.read(1) != b"[":
        pass
    while block := file.read(PART_BYTES):
        text += decoder.decode(block)
        if len(text) < wanted and file.peek(1):
            continue
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
        wanted = min(2 * len(text), _LONGEST_LINE)  # it is tried again when it has doubled: in linear time
        if len(text) > _LONGEST_LINE:
            break
    if text.strip() != "]":
        raise InputError(
            f"{name} is not an array of JSON from value {number + 1} on, which may have "
            f"{_LONGEST_LINE:,} characters"
        )


def _csv_rows(name: str, errors: str, parts: Sequence[int] | None) -> Iterator[dict[str, Any]]:
    """The rows of CSV, where every value is text, or of TSV."""
    csv.field_size_limit(_LONGEST_LINE)
    separator = "\t" if ".tsv" in _suffixes(name) else ","
    with _opened(name) as file:
        lines = (f"{line}\n" for line in _lines(file, name, errors))
        reader = csv.DictReader(lines, delimiter=separator, strict=True)
        try:
            for row in reader:
                if more := row.pop(None, []):  # values beyond those of the header
                    raise csv.Error(f"expected {len(row)} values, got {len(row) + len(more)}")
                yield row
        except csv.Error as error:
            raise InputError(f"{name}, line {reader.reader.line_num}: {error}") from None


# Not with `datasets`, which changes rows of files: the text `None` becomes no text, a date becomes a time.
_READERS = {"json": _json_rows, "csv": _csv_rows}


def _tables(name: str, errors: str, parts: Sequence[int] | None) -> Iterator[Any]:
    """The rows of a file, many at once: lists, or of Parquet tables of Arrow, of which a part may be read."""
    kind = file_format(name)
    if kind == "parquet":
        from pyarrow.parquet import ParquetFile

        with _opened(name) as file:
            yield from ParquetFile(file).iter_batches(_ROWS_AT_ONCE, row_groups=parts)
        return
    rows = _READERS[kind](name, errors, parts)
    while batch := list(islice(rows, _ROWS_AT_ONCE)):
        yield batch


def _documents(tables: Iterable[Any], column: str, name: str, template: Template) -> Iterator[Document]:
    """The documents in rows, which are given many at once, in lists or in tables of Arrow."""
    number = 0
    for table in tables:
        listed = isinstance(table, list)
        present = list(dict.fromkeys(chain.from_iterable(table))) if listed else table.column_names
        names = _choose_columns(column, present, name)
        for row in table if listed else table.select(names).to_pylist():
            number += 1
            try:
                yield _read_row({key: row.get(key) for key in names}, template)
            except InputError as error:
                raise InputError(f"{name}, row {number}: {error}") from None


def _choose_columns(column: str, present: list[str], name: str) -> list[str]:
    """The columns to read: texts, messages, or prompts and completions. `text` may stand for examples."""
    wanted = [column] if column in present else [part.strip() for part in column.split(",")]
    if wanted == ["text"]:
        wanted = next((names for names in _EXAMPLES if {*names} <= {*present}), wanted)
    if len(wanted) > 2 or not {*wanted} <= {*present}:
        raise InputError(
            f"{name} has no column {column!r}, it has {', '.join(present)}: choose one with --text_column, "
            "or PROMPT,COMPLETION (gpt fit: --data.text_column)"
        )
    return wanted


def _read_row(row: dict[str, Any], template: Template) -> Document:
    """The document of a row's columns: a missing text or completion is empty."""
    (name, messages), *others = row.items()
    if others:
        pair = zip(("user", "assistant"), row.values(), strict=True)
        messages = [{"role": role, "content": "" if text is None else text} for role, text in pair]
    elif name != MESSAGES and not isinstance(messages, list):
        if not isinstance(messages, str | None):
            raise InputError(f"column {name!r} holds {type(messages).__name__}, expected text")
        return [Part(messages or "", True)]
    elif isinstance(messages, str):
        try:
            messages = json.loads(messages)
        except ValueError as error:
            raise InputError(f"its messages are not JSON: {error}") from None
    *parts, (rest, _) = template.parts(messages)
    if rest or messages[-1]["role"] != "assistant":
        raise InputError(f"its last message is the {messages[-1]['role']}'s, expected the assistant's")
    return parts if all(text.strip() for text, scored in parts if scored) else []


def _lines(file: IO[bytes], name: str, errors: str, parts: Sequence[int] | None = None) -> Iterator[str]:
    """The lines of a text file, or those that begin in some of its parts; an InputError for one too long."""
    _check_text(file, name)
    for begin, end in [(part * PART_BYTES, (part + 1) * PART_BYTES) for part in parts or ()] or [
        (0, 1 << 62)
    ]:
        if begin:  # to the end of the line before
            file.seek(begin - 1)
            begin += len(file.readline(_LONGEST_LINE)) - 1
        while begin < end and (line := file.readline(_LONGEST_LINE + 1)):
            if len(line) > _LONGEST_LINE:
                raise InputError(f"{name} has a line of more than {_LONGEST_LINE:,} bytes, the limit")
            text = line.removesuffix(b"\n")
            yield _decoded(text if begin else text.removeprefix(codecs.BOM_UTF8), errors, name, begin)
            begin += len(line)


def _decoded(data: bytes, errors: str, name: str, position: int) -> str:
    """Text of a file from a position on; an InputError names the first byte that is not UTF-8."""
    try:
        return data.decode("utf-8", errors)
    except UnicodeDecodeError as error:
        raise InputError(
            f"{name} is not UTF-8: byte {position + error.start} cannot be decoded; --errors replace (gpt "
            "fit: --data.errors replace) reads it with U+FFFD there"
        ) from error


def _check_text(file: Any, name: str) -> None:
    """An InputError for a file whose beginning is known not to be UTF-8 text."""
    head = file.peek(_LOOKED_AT)[:_LOOKED_AT]
    found = next((kind for magic, kind in _NOT_TEXT.items() if head.startswith(magic)), "")
    fewer, more = sorted((head[::2].count(0), head[1::2].count(0)))
    if head[257:262] == b"ustar":
        found = "a tar archive"
    elif not found and len(head) >= 64 and more > 0.4 * len(head) > 1.3 * fewer:
        found = "UTF-16 or UTF-32"
    if found:
        raise InputError(f"{name} is {found}, expected UTF-8 text: unpack it, or save it as UTF-8")


def _open_zstd(file: IO[bytes]) -> io.BufferedReader:
    from pyarrow import CompressedInputStream  # zstandard's own reader does not report a truncated file

    return io.BufferedReader(CompressedInputStream(file, "zstd"))


_DECOMPRESSED: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _open_zstd}


@contextmanager
def _opened(name: str) -> Iterator[Any]:
    """The bytes at a path or URL, decompressed according to its ending, as a buffered reader."""
    import fsspec

    decompressed = _DECOMPRESSED.get(_suffixes(name)[-1], nullcontext)
    found = fsspec.open(name, "rb") if is_url(name) else open(name, "rb", buffering=0)  # noqa: SIM115
    with found as file, decompressed(file) as plain, io.BufferedReader(plain, PART_BYTES) as reader:
        yield reader


def file_format(name: str) -> str:
    """`text`, or what the rows of the file are in: `json`, `csv`, `parquet`."""
    suffix = ["", *_suffixes(name)][-2 if is_compressed(name) else -1]
    return next((kind for kind, endings in _ENDINGS.items() if suffix in endings), "text")


def is_compressed(name: str) -> bool:
    """Whether the file's ending is one of a compression."""
    return _suffixes(name)[-1] in _DECOMPRESSED


def _suffixes(name: str) -> list[str]:
    """The endings of a file's name in lower case, without a URL's query; at least one, which may be empty."""
    path = name.partition("?")[0] if is_url(name) else name
    parts = os.path.basename(path).lower().lstrip(".").split(".")
    return [f".{part}" for part in parts[1:]] or [""]


def is_url(name: str) -> bool:
    """Whether `name` has a protocol."""
    return "://" in name and re.match(r"[a-z][a-z0-9+.-]+://", name) is not None
