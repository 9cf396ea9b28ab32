"""From files, URLs and rows to documents, piece by piece: text, JSON, CSV, Parquet; plain or compressed.

Plain text is read here, not through `datasets`, which turns `\\r\\n` into `\\n`, reads a whole line or file
at once, and cannot say which byte is not UTF-8. Rows are read by `datasets`, imported on need.
"""

import codecs
import io
import re
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple

from gpt.data.examples import MESSAGES, choose_columns, read_example
from gpt.errors import InputError
from gpt.template import Part, Template
from gpt.tokenizer import split_at_words

LONGEST_PIECE = 1 << 20
"""Characters in a piece. A longer document comes as several, so memory does not grow with documents."""

_ENDINGS = {"json": (".json", ".jsonl", ".ndjson"), "csv": (".csv", ".tsv"), "parquet": (".parquet",)}
_COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd"}
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
Document = str | list[Part]
"""A text, or an example in parts: none where it is left out."""

_ROWS_AT_ONCE = 256
_BYTES_AT_ONCE = 1 << 20
_LONGEST_LINE = 256 << 20


class Piece(NamedTuple):
    """A document or a part of one."""

    text: str
    first: bool = True
    last: bool = True
    """Whether `<|endoftext|>` follows it, as it also does inside a conversation."""
    scored: bool = True
    """Whether a model learns to write it; of an example, the first piece is not."""


def file_pieces(name: str, column: str, errors: str, template: Template) -> Iterator[Piece]:
    """The documents of a file or URL: a text file is one, and each row of the other formats is one.

    An InputError says what is wrong with its content; an OSError, that it cannot be opened.
    """
    if compression(name) == "zstd":
        from fsspec.compression import register_compression

        register_compression("zstd", _open_zstd, "zst", force=True)
    with _named(name):
        if file_format(name) == "text":
            yield from _document(_decoded(name, errors))
        else:
            yield from cut(_file_rows(name, column, errors, template))


def hub_rows(
    column: str, template: Template, path: str, subset: str | None, **options: Any
) -> Iterator[Document]:
    """The documents of a Hugging Face data set; the options are those of `datasets.load_dataset`."""
    from datasets import load_dataset

    with _named(f"hub:{path}"):
        yield from _documents(load_dataset(path, subset, **options), column, f"hub:{path}", template)


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
        if is_url(name):
            raise InputError(
                f"cannot read {name} ({line}): check the address and the network, "
                "or download the file by other means and give its path"
            ) from error
        if isinstance(error, OSError) and error.filename:
            raise
        what = name if (kind := file_format(name)) == "text" else f"{name} as {kind}"
        raise InputError(f"cannot read {what}: {line}") from error


def join(rows: Iterable[Document], starts: str) -> Iterator[str]:
    """Documents from rows that are parts of them: a row that matches the expression `starts` begins one."""
    document: list[str] = []
    for row in rows:
        if not isinstance(row, str):
            raise InputError("document_starts joins rows of text, these are examples")
        if document and re.match(starts, row):
            yield "".join(document)
            document = []
        document.append(row)
    if document:
        yield "".join(document)


def cut(documents: Iterable[Document]) -> Iterator[Piece]:
    """Documents cut into pieces; an example without parts has no text."""
    for document in documents:
        if isinstance(document, str):
            yield from _document([document])
            continue
        for number, (text, scored) in enumerate(document or [Part("", True)]):
            for piece in _document([text]):
                first, last = piece.first and number == 0, piece.last and scored
                yield Piece(piece.text, first, last, scored=scored and bool(document))


def _document(blocks: Iterable[str]) -> Iterator[Piece]:
    """The pieces of one document that is read in blocks, cut where `split_at_words` would cut all of it."""
    text, first = "", True
    for block in blocks:
        *complete, text = list(split_at_words(text + block, LONGEST_PIECE)) or [""]
        for part in complete:
            yield Piece(part, first, last=False)
            first = False
    yield Piece(text, first)


def _decoded(name: str, errors: str) -> Iterator[str]:
    """The blocks of a text file; an InputError names the first byte that is not UTF-8."""
    decoder, position = codecs.getincrementaldecoder("utf-8")(errors), 0
    for block in chain(_blocks(name), [b""]):
        if not position:
            _check_text(block[:4096], name)
        position += len(block)
        try:
            yield decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise InputError(
                f"{name} is not UTF-8: byte {position - len(error.object) + error.start} cannot be decoded; "
                "--errors replace (gpt fit: --data.errors replace) reads it with U+FFFD there"
            ) from error


def _file_rows(name: str, column: str, errors: str, template: Template) -> Iterator[Document]:
    kind = file_format(name)
    decoded = kind != "parquet" and not is_url(name)
    if decoded:
        _check_text(next(_blocks(name), b"")[:4096], name)
    if kind == "json" and decoded:
        _check_lines(name)
    options: dict[str, Any] = {} if kind == "parquet" else {"encoding_errors": errors}
    if kind == "json" and errors == "replace":
        options["encoding"] = "utf_8"  # the JSON reader decodes, and so replaces, only where not named utf-8
    if ".tsv" in _suffixes(name):
        options["sep"] = "\t"
    # `load_dataset` would report each file to the hub; the reader that it calls does not.
    reader = getattr(import_module(f"datasets.io.{kind}"), f"{kind.capitalize()}DatasetReader")
    try:
        yield from _documents(reader(name, streaming=True, **options).read(), column, name, template)
    except (InputError, OSError):
        raise
    except Exception:
        if errors == "strict" and decoded:  # raise the error that names the first byte which is not UTF-8
            deque(_decoded(name, errors), maxlen=0)
        raise


def _documents(rows: Any, column: str, name: str, template: Template) -> Iterator[Document]:
    """The document of each row; a missing value is an empty text."""
    number = 0
    for table in rows.with_format("arrow").iter(batch_size=_ROWS_AT_ONCE):
        names = choose_columns(column, table.column_names, name)
        for values in zip(*(table.column(name).to_pylist() for name in names), strict=True):
            number += 1
            if names != (MESSAGES,) and len(values) == 1 and not isinstance(values[0], list):
                if not isinstance(values[0], str | None):
                    kind = type(values[0]).__name__
                    raise InputError(f"column {column!r} of {name} holds {kind}, expected text")
                yield values[0] or ""
                continue
            try:
                yield read_example(values, template)
            except InputError as error:
                raise InputError(f"{name}, row {number}: {error}") from None


def _check_text(head: bytes, name: str) -> None:
    """Raise an error about the beginning of a file that is known not to be UTF-8 text."""
    found = next((kind for magic, kind in _NOT_TEXT.items() if head.startswith(magic)), "")
    fewer, more = sorted((head[::2].count(0), head[1::2].count(0)))
    if head[257:262] == b"ustar":
        found = "a tar archive"
    elif not found and len(head) >= 64 and more > 0.4 * len(head) > 1.3 * fewer:
        found = "UTF-16 or UTF-32"
    if found:
        raise InputError(f"{name} is {found}, expected UTF-8 text: unpack it, or save it as UTF-8")


def _check_lines(name: str) -> None:
    """Raise an error about a line too long for `datasets`, which reads lines whole: gigabytes, compressed."""
    length = 0
    for block in _blocks(name):
        first, *others = block.split(b"\n")
        length += len(first)
        longest = max(length, *map(len, others), 0)
        if longest > _LONGEST_LINE:
            raise InputError(f"{name} has a line of more than {_LONGEST_LINE:,} bytes, the limit")
        length = len(others[-1]) if others else length


def _blocks(name: str) -> Iterator[bytes]:
    """The bytes of a file or URL, decompressed according to its ending."""
    import fsspec

    is_plain = not is_url(name) and not compression(name)
    with open(name, "rb") if is_plain else fsspec.open(name, "rb", compression=compression(name)) as file:
        yield from iter(partial(file.read, _BYTES_AT_ONCE), b"")


def _open_zstd(file: IO[bytes], **_: Any) -> io.BufferedReader:
    """Arrow's reader, as zstandard's own does not report a truncated file."""
    from pyarrow import CompressedInputStream

    return io.BufferedReader(CompressedInputStream(file, "zstd"))


def file_format(name: str) -> str:
    """`text`, or the reader of `datasets` for the file's rows: `json`, `csv`, `parquet`."""
    suffix = ["", *_suffixes(name)][-2 if compression(name) else -1]
    return next((kind for kind, endings in _ENDINGS.items() if suffix in endings), "text")


def compression(name: str) -> str | None:
    """The compression of a file by its name, as fsspec calls it."""
    return _COMPRESSIONS.get(_suffixes(name)[-1])


def _suffixes(name: str) -> list[str]:
    """The endings of a file's name in lower case, without a URL's query; at least one, which may be empty."""
    path = Path(name.partition("?")[0] if is_url(name) else name)
    return [suffix.lower() for suffix in path.suffixes] or [""]


def is_url(name: str) -> bool:
    """Whether `name` has a protocol."""
    return re.match(r"[a-z][a-z0-9+.-]+://", name) is not None
