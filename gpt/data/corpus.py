"""What a corpus is, and its documents in order: text files, tables of rows, hub data sets, built-in ones.

Plain text is read here rather than through `datasets`, which turns `\\r\\n` into `\\n`, reads a line or a
file whole and cannot say which byte is not UTF-8. What has rows goes through `datasets`, imported on need.
"""

import codecs
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from glob import glob
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple

from gpt.data import builtin
from gpt.errors import InputError
from gpt.tokenizer import split_at_words

_BUILTIN = {"python-docs": builtin.python_docs, "python-stdlib": builtin.python_stdlib}
_FORMATS = {
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
}
_COMPRESSED = {".gz", ".bz2", ".xz", ".zst"}
_ROWS_AT_ONCE = 256
_BYTES_AT_ONCE = 1 << 20

LONGEST_PIECE = 1 << 20
"""Characters in a piece: a longer document comes as several, so that memory does not grow with documents."""


class Piece(NamedTuple):
    """A document or a part of one; `last` ends the document."""

    text: str
    last: bool


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Where documents come from: exactly one of `builtin`, `files` and `hub`.

    Raises:
        InputError: none or several of the three, or an unknown built-in or `errors`.
    """

    builtin: str | None = None
    """`python-docs` or `python-stdlib`."""
    files: tuple[str, ...] = ()
    """Paths or URLs. Each text file is a document; each row of a JSON, CSV or Parquet file is one."""
    hub: str | None = None
    """A Hugging Face data set, OWNER/NAME."""
    subset: str | None = None
    """The hub data set's configuration, where it has several."""
    split: str = "train"
    """The hub data set's split."""
    revision: str | None = None
    """The hub data set's commit or tag; without one, prepared data is not renewed when the data set is."""
    streaming: bool = True
    """Read the hub data set as it comes, rather than download it whole first."""
    text_column: str = "text"
    """The column of the rows that holds the text."""
    errors: str = "strict"
    """What to do with bytes that are not UTF-8: `strict` stops, `replace` puts U+FFFD in their place."""

    def __post_init__(self) -> None:
        if sum(map(bool, (self.builtin, self.files, self.hub))) != 1:
            raise InputError("a corpus needs exactly one of builtin, files and hub")
        if self.builtin and self.builtin not in _BUILTIN:
            raise InputError(f"unknown built-in corpus {self.builtin!r}, expected {' or '.join(_BUILTIN)}")
        if self.errors not in ("strict", "replace"):
            raise InputError(f"errors must be strict or replace, got {self.errors!r}")

    def fingerprint(self) -> str:
        """A hash of the content, and of the options that decide how it is read.

        Local files are hashed whole; URLs and hub data sets by their name and revision, without network.
        """
        digest = hashlib.sha256(
            json.dumps(asdict(replace(self, files=("-",) if self.files else ()))).encode()
        )
        if self.builtin:
            digest.update(builtin.library_fingerprint().encode())
        for name in self.files:
            digest.update(f"\0{_format(name)}\0".encode())
            if _is_url(name):
                digest.update(name.encode())
                continue
            with open(name, "rb") as file:
                while block := file.read(_BYTES_AT_ONCE):
                    digest.update(block)
        return digest.hexdigest()

    def summary(self) -> dict[str, Any]:
        """The fields that are set, for the metadata of prepared files."""
        return {key: value for key, value in asdict(self).items() if value}

    def size(self) -> int | None:
        """Bytes of UTF-8 text, for a progress bar; None where only reading could tell."""
        if self.files and all(_format(name) == "text" and not _is_packed(name) for name in self.files):
            return sum(Path(name).stat().st_size for name in self.files)
        return None

    def pieces(self) -> Iterator[Piece]:
        """The documents in order, each as pieces of at most `LONGEST_PIECE` characters.

        Raises:
            InputError: a file that is not UTF-8 or not what its name says, a column that is not there.
            OSError: a file that cannot be read.
        """
        if self.builtin:
            yield from _cut(_BUILTIN[self.builtin]())
        elif self.hub:
            yield from _cut(self._hub_rows())
        for name in self.files:
            yield from self._file(name)

    def _file(self, name: str) -> Iterator[Piece]:
        if _format(name) == "text":
            with _open(name) as file:
                yield from _text_pieces(file, name, self.errors)
        else:
            yield from _cut(self._file_rows(name))

    def _file_rows(self, name: str) -> Iterator[str]:
        from datasets import load_dataset

        kind = _format(name)
        options: dict[str, Any] = {} if kind == "parquet" else {"encoding_errors": self.errors}
        if ".tsv" in Path(name).suffixes:
            options["sep"] = "\t"
        try:
            rows = load_dataset(kind, data_files=name, split="train", streaming=True, **options)
            yield from _column(rows, self.text_column, name)
        except (InputError, OSError):
            raise
        except Exception as error:  # pyarrow, pandas and datasets have no exception in common
            _check_utf8(name)
            raise InputError(f"cannot read {name} as {kind}: {_first_line(error)}") from error

    def _hub_rows(self) -> Iterator[str]:
        from datasets import load_dataset

        name = f"hub:{self.hub}"
        try:
            rows = load_dataset(
                self.hub, self.subset, split=self.split, revision=self.revision, streaming=self.streaming
            )
            yield from _column(rows, self.text_column, name)
        except InputError:
            raise
        except Exception as error:
            raise InputError(f"cannot read {name}: {_first_line(error)}") from error


def find_corpus(name: str, **options: Any) -> Corpus:
    """The corpus that a person means by `name`.

    A file, a folder (all its files that are not hidden), a pattern with `*`, a URL, `hub:OWNER/NAME`, a
    recipe's name or a recipe's own YAML file; tried in that order.

    Args:
        name: as above.
        options: fields of `Corpus` that differ from the recipe's or from the default; None changes nothing.

    Raises:
        InputError: nothing is found there.
    """
    options = {key: value for key, value in options.items() if value is not None}
    path = Path(name).expanduser()
    if path.is_dir():
        found = sorted(str(file) for file in path.rglob("*") if file.is_file() and not _is_hidden(file, path))
        if not found:
            raise InputError(f"the folder {name} has no files")
        return Corpus(files=tuple(found), **options)
    if path.is_file():
        return (
            _read_recipe(path, options) if path.suffix == ".yaml" else Corpus(files=(str(path),), **options)
        )
    if _is_url(name):
        return Corpus(files=(name,), **options)
    if any(mark in name for mark in "*?["):
        found = sorted(file for file in glob(str(path), recursive=True) if Path(file).is_file())
        if not found:
            raise InputError(f"no file matches {name}")
        return Corpus(files=tuple(found), **options)
    if name.startswith("hub:"):
        return Corpus(hub=name.removeprefix("hub:"), **options)
    recipe = recipes().get(name)
    if recipe is None:
        raise InputError(
            f"no corpus {name!r}: expected a text file, a folder, a pattern, a URL, hub:OWNER/NAME "
            f"or one of the recipes {', '.join(recipes())}"
        )
    return _read_recipe(recipe, options)


def documents(corpus: str, **options: Any) -> Iterator[str]:
    """The documents of a corpus, whole and in order; the arguments are `find_corpus`'s."""
    parts: list[str] = []
    for piece in find_corpus(corpus, **options).pieces():
        parts.append(piece.text)
        if piece.last:
            yield "".join(parts)
            parts.clear()


def recipes() -> dict[str, Path]:
    """The YAML file of every recipe, by name: `gpt/recipes` when installed, `data` beside the source."""
    package = Path(__file__).parents[1]
    folder = package / "recipes"
    if not folder.is_dir():
        folder = package.parent / "data"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def _read_recipe(path: Path, options: Mapping[str, Any]) -> Corpus:
    import yaml

    try:
        recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
        corpus = dict(recipe["corpus"])
    except (yaml.YAMLError, TypeError, KeyError, ValueError) as error:
        raise InputError(f"{path} is not a recipe: it needs a mapping under `corpus`") from error
    known = [field.name for field in fields(Corpus)]
    if unknown := sorted(set(corpus) - set(known)):
        raise InputError(
            f"{path}: unknown setting {', '.join(unknown)} of a corpus, expected {', '.join(known)}"
        )
    files = [corpus.pop("files", [])]
    names = files[0] if isinstance(files[0], list) else files
    return Corpus(**{**corpus, "files": tuple(names), **options})


def _cut(texts: Iterator[str]) -> Iterator[Piece]:
    for text in texts:
        if len(text) <= LONGEST_PIECE:
            yield Piece(text, last=True)
            continue
        parts = list(split_at_words(text, LONGEST_PIECE))
        for part in parts[:-1]:
            yield Piece(part, last=False)
        yield Piece(parts[-1], last=True)


def _text_pieces(file: IO[bytes], name: str, errors: str) -> Iterator[Piece]:
    """One document, read as it goes and cut where `split_at_words` would cut the whole."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors)
    text, position = "", 0
    for block in chain(iter(partial(file.read, _BYTES_AT_ONCE), b""), [b""]):
        position += len(block)
        try:
            text += decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise _not_utf8(name, position - len(error.object) + error.start) from error
        *whole, text = split_at_words(text, LONGEST_PIECE) or [""]
        for part in whole:
            yield Piece(part, last=False)
    yield Piece(text, last=True)


def _column(rows: Any, column: str, name: str) -> Iterator[str]:
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
    if _format(name) != "parquet":
        with _open(name) as file:
            for _ in _text_pieces(file, name, "strict"):
                pass


def _not_utf8(name: str, byte: int) -> InputError:
    return InputError(f"{name} is not UTF-8: byte {byte} cannot be decoded; --errors replace reads it anyway")


def _open(name: str) -> IO[bytes]:
    """Open a file or URL for its plain bytes, decompressed by what its name ends on."""
    if not _is_url(name) and not _is_packed(name):
        return open(name, "rb")
    import fsspec  # type: ignore[import-untyped]

    if name.endswith(".zst") and find_spec("zstandard") is None:
        raise InputError(f"{name} needs the package zstandard: pip install zstandard")
    opened: IO[bytes] = fsspec.open(name, "rb", compression="infer").open()
    return opened


def _format(name: str) -> str:
    """`text`, or the builder of `datasets` that reads the file's rows."""
    path = Path(name.partition("?")[0])
    suffix = Path(path.stem).suffix if path.suffix in _COMPRESSED else path.suffix
    return _FORMATS.get(suffix.lower(), "text")


def _is_packed(name: str) -> bool:
    return Path(name).suffix in _COMPRESSED


def _is_url(name: str) -> bool:
    return re.match(r"[a-z][a-z0-9+.-]+://", name) is not None


def _is_hidden(file: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(root).parts)


def _first_line(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
