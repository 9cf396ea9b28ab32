"""From files, URLs and rows to documents, piece by piece: text, JSON, CSV, Parquet; plain or compressed."""

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, NamedTuple

from gpt.errors import InputError
from gpt.text.template import Part, Template
from gpt.text.tokenizer import split_at_words

LONGEST_PIECE = 1 << 20  # characters

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
_BYTES_AT_ONCE = 1 << 20
_LONGEST_LINE = 256 << 20


class Piece(NamedTuple):
    """A document or a part of one."""

    text: str
    first: bool = True
    last: bool = True  # `<|endoftext|>` follows it, also inside a conversation
    scored: bool = True  # a model learns to write it; of an example, the first piece is not
    split: str = ""  # `train` or `val`, see `gpt.data.corpus.choose_split`


def file_pieces(name: str, column: str, errors: str, template: Template) -> Iterator[Piece]:
    """The documents of a file or URL: the text, or each row."""
    with _named(name):
        if file_format(name) == "text":
            yield from _document(_decoded(name, errors))
        else:
            yield from cut(_documents(_tables(name, errors), column, name, template))


def hub_rows(
    column: str, template: Template, path: str, subset: str | None, **options: Any
) -> Iterator[Document]:
    """The documents of a Hugging Face data set; the options are `load_dataset`'s."""
    from datasets import load_dataset

    with _named(f"hub:{path}"):
        tables = load_dataset(path, subset, **options).with_format("arrow").iter(batch_size=_ROWS_AT_ONCE)
        yield from _documents(tables, column, f"hub:{path}", template)


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
        for number, (text, scored) in enumerate(document or [Part("", False)]):
            for piece in _document([text]):
                last = piece.last and (scored or not document)
                yield Piece(piece.text, piece.first and number == 0, last, scored)


def _document(blocks: Iterable[str]) -> Iterator[Piece]:
    """The pieces of one document, cut where `split_at_words` would cut all of it."""
    text, first = "", True
    for block in blocks:
        *complete, text = list(split_at_words(text + block, LONGEST_PIECE)) or [""]
        for part in complete:
            yield Piece(part, first, last=False)
            first = False
    yield Piece(text, first)


def _json_rows(name: str, errors: str) -> Iterator[dict[str, Any]]:
    """The objects of JSON lines or of an array; a text stands for one with the column `text`."""
    lines = _lines(name, errors)
    for number, line in enumerate(lines, start=1):
        whole = line.lstrip().startswith("[")
        try:
            values = json.loads("\n".join([line, *lines]) if whole else line) if line.strip() else []
        except ValueError as error:
            raise InputError(f"{name} is not JSON from line {number} on: {error}") from None
        for value in values if isinstance(values, list) else [values]:
            row = {"text": value} if isinstance(value, str) else value
            if not isinstance(row, dict):
                raise InputError(f"{name}, line {number}: expected an object, got {value!r:.80}")
            yield row


def _csv_rows(name: str, errors: str) -> Iterator[dict[str, Any]]:
    """The rows of CSV, where every value is text, or of TSV."""
    csv.field_size_limit(_LONGEST_LINE)
    separator = "\t" if ".tsv" in _suffixes(name) else ","
    reader = csv.DictReader((f"{line}\n" for line in _lines(name, errors)), delimiter=separator, strict=True)
    try:
        for row in reader:
            if more := row.pop(None, []):  # values beyond those of the header
                raise csv.Error(f"expected {len(row)} values, got {len(row) + len(more)}")
            yield row
    except csv.Error as error:
        raise InputError(f"{name}, line {reader.reader.line_num}: {error}") from None


# Not with `datasets`, which changes rows of files: the text `None` becomes no text, a date becomes a time.
_READERS = {"json": _json_rows, "csv": _csv_rows}


def _tables(name: str, errors: str) -> Iterator[Any]:
    """The rows of a file, many at once: lists, or of Parquet tables of Arrow, of which a part may be read."""
    kind = file_format(name)
    if kind == "parquet":
        from pyarrow.parquet import ParquetFile

        with _opened(name) as file:
            yield from ParquetFile(file).iter_batches(_ROWS_AT_ONCE)
        return
    rows = _READERS[kind](name, errors)
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


def _lines(name: str, errors: str) -> Iterator[str]:
    """The lines of a text file, without a byte order mark; an InputError for one too long for memory."""
    rest: list[str] = []  # parts of a line, which are joined once
    for block in _decoded(name, errors, "utf-8-sig"):
        first, *others = block.split("\n")
        rest.append(first)
        if sum(map(len, rest)) > _LONGEST_LINE:
            raise InputError(f"{name} has a line of more than {_LONGEST_LINE:,} characters, the limit")
        if others:
            yield "".join(rest)
            yield from others[:-1]
            rest = others[-1:]
    if any(rest):
        yield "".join(rest)


def _decoded(name: str, errors: str, encoding: str = "utf-8") -> Iterator[str]:
    """The blocks of a text file; an InputError names the first byte that is not UTF-8."""
    decoder, position = codecs.getincrementaldecoder(encoding)(errors), 0
    with _opened(name) as file:
        for block in chain(iter(partial(file.read, _BYTES_AT_ONCE), b""), [b""]):
            if not position:
                _check_text(block[:4096], name)
            position += len(block)
            try:
                yield decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                byte = position - len(error.object) + error.start
                raise InputError(
                    f"{name} is not UTF-8: byte {byte} cannot be decoded; --errors replace (gpt fit: "
                    "--data.errors replace) reads it with U+FFFD there"
                ) from error


def _check_text(head: bytes, name: str) -> None:
    """An InputError for the beginning of a file that is known not to be UTF-8 text."""
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
    """The file of the bytes at a path or URL, decompressed according to its ending."""
    import fsspec

    decompressed = _DECOMPRESSED.get(_suffixes(name)[-1], nullcontext)
    with fsspec.open(name, "rb") if is_url(name) else open(name, "rb") as file, decompressed(file) as plain:
        yield plain


def file_format(name: str) -> str:
    """`text`, or what the rows of the file are in: `json`, `csv`, `parquet`."""
    suffix = ["", *_suffixes(name)][-2 if is_compressed(name) else -1]
    return next((kind for kind, endings in _ENDINGS.items() if suffix in endings), "text")


def is_compressed(name: str) -> bool:
    """Whether the file's ending is one of a compression."""
    return _suffixes(name)[-1] in _DECOMPRESSED


def _suffixes(name: str) -> list[str]:
    """The endings of a file's name in lower case, without a URL's query; at least one, which may be empty."""
    path = Path(name.partition("?")[0] if is_url(name) else name)
    return [suffix.lower() for suffix in path.suffixes] or [""]


def is_url(name: str) -> bool:
    """Whether `name` has a protocol."""
    return re.match(r"[a-z][a-z0-9+.-]+://", name) is not None
