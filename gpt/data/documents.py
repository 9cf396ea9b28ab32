"""From files, URLs and rows to documents, piece by piece: text, JSON, CSV, Parquet; plain or compressed.

Plain text is read here, not through `datasets`, which turns `\\r\\n` into `\\n`, reads a whole line or file
at once, and cannot say which byte is not UTF-8. Rows are read by `datasets`, imported on need.
"""

import codecs
import re
from collections.abc import Iterable, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple

from gpt.errors import InputError
from gpt.tokenizer import split_at_words

LONGEST_PIECE = 1 << 20
"""Characters in a piece. A longer document comes as several, so memory does not grow with documents."""

_ENDINGS = {"json": (".json", ".jsonl", ".ndjson"), "csv": (".csv", ".tsv"), "parquet": (".parquet",)}
_COMPRESSED = {".gz", ".bz2", ".xz", ".zst"}
_ROWS_AT_ONCE = 256
_BYTES_AT_ONCE = 1 << 20


class Piece(NamedTuple):
    """A document or a part of one."""

    text: str
    first: bool = True
    last: bool = True
    split: str = ""
    """`train` or `val`, once chosen."""


def file_pieces(name: str, column: str, errors: str) -> Iterator[Piece]:
    """The documents of a file or URL: a text file is one, and each row of the other formats is one.

    Args:
        name: its ending decides the format and the compression.
        column: the column of the text, in rows.
        errors: `strict` or `replace`, for bytes that are not UTF-8.

    Raises:
        InputError: not UTF-8, not of the format that its name says, or no such column.
        OSError: it cannot be opened.
    """
    if file_format(name) == "text":
        with _open(name) as file:
            yield from _text_pieces(file, name, errors)
    else:
        yield from cut(_file_rows(name, column, errors))


def hub_rows(column: str, path: str, *options: Any, **more: Any) -> Iterator[str]:
    """The texts of a Hugging Face data set; all but `column` goes to `datasets.load_dataset`.

    Raises:
        InputError: there is no such data set, configuration, split or column, or no network.
    """
    from datasets import load_dataset

    try:
        yield from _texts(load_dataset(path, *options, **more), column, f"hub:{path}")
    except InputError:
        raise
    except Exception as error:  # the hub, its client, pyarrow and datasets share no exception class
        raise InputError(f"cannot read hub:{path}: {_first_line(error)}") from error


def join(rows: Iterable[str], starts: str) -> Iterator[str]:
    """Documents from rows that are parts of them: a row that matches the expression `starts` begins one."""
    document: list[str] = []
    for row in rows:
        if document and re.match(starts, row):
            yield "".join(document)
            document = []
        document.append(row)
    if document:
        yield "".join(document)


def cut(texts: Iterable[str]) -> Iterator[Piece]:
    """Documents cut into pieces."""
    for text in texts:
        parts = list(split_at_words(text, LONGEST_PIECE)) or [""]
        for number, part in enumerate(parts, start=1):
            yield Piece(part, first=number == 1, last=number == len(parts))


def _text_pieces(file: IO[bytes], name: str, errors: str) -> Iterator[Piece]:
    """One document, read in blocks and cut where `split_at_words` would cut all of it."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors)
    text, position, first = "", 0, True
    for block in chain(iter(partial(file.read, _BYTES_AT_ONCE), b""), [b""]):
        position += len(block)
        try:
            text += decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise _not_utf8(name, position - len(error.object) + error.start) from error
        *complete, text = list(split_at_words(text, LONGEST_PIECE)) or [""]
        for part in complete:
            yield Piece(part, first, last=False)
            first = False
    yield Piece(text, first)


def _file_rows(name: str, column: str, errors: str) -> Iterator[str]:
    kind = file_format(name)
    options: dict[str, Any] = {} if kind == "parquet" else {"encoding_errors": errors}
    if kind == "json" and errors == "replace":
        options["encoding"] = "utf_8"  # the JSON reader decodes, and so replaces, only where not named utf-8
    if ".tsv" in Path(name).suffixes:
        options["sep"] = "\t"
    # `load_dataset` would report each file to the hub; the reader that it calls does not.
    reader = getattr(import_module(f"datasets.io.{kind}"), f"{kind.capitalize()}DatasetReader")
    try:
        yield from _texts(reader(name, streaming=True, **options).read(), column, name)
    except (InputError, OSError):
        raise
    except Exception as error:  # pyarrow, pandas and datasets share no exception class
        if errors == "strict":
            _check_utf8(name)
        raise InputError(f"cannot read {name} as {kind}: {_first_line(error)}") from error


def _texts(rows: Any, column: str, name: str) -> Iterator[str]:
    """The texts of one column; a missing value is an empty text."""
    for table in rows.with_format("arrow").iter(batch_size=_ROWS_AT_ONCE):
        if column not in table.column_names:
            raise InputError(
                f"{name} has no column {column!r}, it has {', '.join(table.column_names)}: "
                "choose one with --text_column"
            )
        for text in table.column(column).to_pylist():
            if not isinstance(text, str | None):
                raise InputError(f"column {column!r} of {name} holds {type(text).__name__}, expected text")
            yield text or ""


def _check_utf8(name: str) -> None:
    """Raise the error that names the first byte of a file that is not UTF-8, if there is one."""
    if file_format(name) != "parquet":
        with _open(name) as file:
            for _ in _text_pieces(file, name, "strict"):
                pass


def _not_utf8(name: str, byte: int) -> InputError:
    return InputError(f"{name} is not UTF-8: byte {byte} cannot be decoded; --errors replace reads it anyway")


def _open(name: str) -> IO[bytes]:
    """Open a file or URL for its plain bytes, decompressed according to its ending."""
    if not is_url(name) and not is_compressed(name):
        return open(name, "rb")
    import fsspec  # type: ignore[import-untyped]

    if name.endswith(".zst") and find_spec("zstandard") is None:
        raise InputError(f"{name} needs the package zstandard: pip install zstandard")
    opened: IO[bytes] = fsspec.open(name, "rb", compression="infer").open()
    return opened


def file_format(name: str) -> str:
    """`text`, or the reader of `datasets` for the file's rows: `json`, `csv`, `parquet`."""
    path = Path(name.partition("?")[0])
    suffix = Path(path.stem).suffix if path.suffix in _COMPRESSED else path.suffix
    return next((kind for kind, endings in _ENDINGS.items() if suffix.lower() in endings), "text")


def is_compressed(name: str) -> bool:
    """Whether the file is compressed, by its name."""
    return Path(name).suffix in _COMPRESSED


def is_url(name: str) -> bool:
    """Whether `name` has a protocol."""
    return re.match(r"[a-z][a-z0-9+.-]+://", name) is not None


def _first_line(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
