"""What a corpus is, and the names it can have: a file, a folder, a hub data set or a recipe."""

import hashlib
import math
import os
import platform
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from gpt.data.documents import (
    TEXT,
    Piece,
    Tolerance,
    check_columns,
    choose_columns,
    cut,
    no_columns,
    read_documents,
)
from gpt.data.folders import find_files, is_pattern, special_kind
from gpt.data.formats import (
    PART_BYTES,
    Row,
    Stretch,
    arrow_rows,
    binary_error,
    estimated_bytes,
    file_format,
    is_binary,
    named,
    part_sizes,
    read_rows,
    read_text,
)
from gpt.errors import InputError, check_least
from gpt.files import StrPath, atomic_write, cache_folder, file_sha256, shipped
from gpt.plain import build, is_hub_name, parse_yaml, shown
from gpt.progress import notice
from gpt.text.template import DEFAULT_TEMPLATE, Template
from gpt.text.tokenizer import split_at_words

T = TypeVar("T")
_PROTOCOLS = ("https", "http", "s3", "gs", "hf")
_LARGEST_RECIPE = 1 << 16  # bytes
_LONGEST_NAME = 50  # characters, of at most 4 bytes: a file's name has at most 255 bytes
_FEWEST_PARTS = 8  # the fewest parts that are read, if the corpus has as many
_ORDERED = 8  # at least one in 8 rows of a part is taken
_PASSAGE = 1 << 13  # characters, the longest passage, where only a share of a text is read
_FEWEST_PASSAGES = 16  # the fewest passages in a part, if it has as many words
_GOLDEN_RATIO = (5**0.5 - 1) / 2


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Where documents come from, and how they are read. See `data/README.md`."""

    files: tuple[str, ...]
    """Paths, URLs, hub:OWNER/NAME, builtin:NAME; URLs are downloaded by `find_corpus`."""
    subset: str | None = None
    revision: str | None = None  # without one, prepared data stays as it is when the hub's data set changes
    sha256: tuple[str, ...] = ()
    """The hash of each file in hexadecimal, or none. A file with another hash is an InputError."""
    weights: tuple[float, ...] = ()
    """The share of each file to read, above 0 and at most 1. Without weights, all of every file is read."""
    text_column: str = TEXT
    template: Template = DEFAULT_TEMPLATE
    skip_bad_rows: int = 0
    """How many rows that cannot be used may be left out, of all files together."""

    def __post_init__(self) -> None:
        check_columns(self.text_column)
        check_least(0, skip_bad_rows=self.skip_bad_rows)
        if self.sha256 and len(self.sha256) != len(self.files):
            raise InputError(f"sha256 has {len(self.sha256)} values for {len(self.files)} files")
        self._check_weights()
        if wrong := [value for value in self.sha256 if not re.fullmatch("[0-9a-f]{64}", value)]:
            raise InputError(f"sha256 is {shown(wrong[0])}, expected 64 hexadecimal digits in lower case")

    def _check_weights(self) -> None:
        if not self.weights:
            return
        if len(self.weights) != len(self.files):
            raise InputError(f"weights has {len(self.weights)} values for {len(self.files)} files")
        if wrong := [weight for weight in self.weights if not 0.0 < weight <= 1.0]:
            raise InputError(
                f"weights has {shown(wrong[0])}, expected the share of a file that is read, above 0 and at "
                "most 1: give the other files smaller ones"
            )
        if len(set(self.files)) < len(self.files):  # two shares of the same file would overlap
            raise InputError("a file is named twice: name each once where there are weights")

    @property
    def _shares(self) -> tuple[float, ...]:
        """The weight of each file, 1 by default."""
        return self.weights or (1.0,) * len(self.files)

    @cached_property
    def _part_sizes(self) -> list[list[int]]:
        """The bytes to read of each part of each file: the part's size times the file's weight."""
        found = zip(self.files, self._shares, strict=True)
        return [[math.ceil(share * size) for size in part_sizes(name, self._choose)] for name, share in found]

    @cached_property
    def _data_sets(self) -> dict[str, Any]:
        """The hub data sets that are open, by name."""
        return {}

    def size(self) -> int | None:
        """The bytes to read in all. None if unknown in advance: files are compressed, or on the hub."""
        return sum(map(sum, self._part_sizes)) if all(self._part_sizes) else None

    def estimated_size(self, read: int, documents: int) -> int:
        """Estimate the bytes of text in all, given that the first `documents` documents had `read` bytes."""
        per_document = read / max(1, documents)
        return sum(
            sum(sizes) or math.ceil(share * self._estimate(name, per_document))
            for name, share, sizes in zip(self.files, self._shares, self._part_sizes, strict=True)
        )

    def _estimate(self, name: str, bytes_per_document: float) -> int:
        if file_format(name) != "hub":
            return estimated_bytes(name)
        info = self._data_set(name).info
        rows = info.splits["train"].num_examples if info.splits and "train" in info.splits else None
        return round(rows * bytes_per_document) if rows else self._stored_bytes(name)

    def _stored_bytes(self, name: str) -> int:
        """The size in bytes of a hub data set's files, which are compressed."""
        from datasets import load_dataset_builder
        from fsspec.core import url_to_fs

        where = name.removeprefix("hub:")
        files = load_dataset_builder(where, self.subset, revision=self.revision).config.data_files or {}
        return sum(system.size(path) or 0 for system, path in map(url_to_fs, files.get("train", [])))

    def stamps(self) -> list[object]:
        """For each file a value that changes when the file does.

        For a file on disk these are its size, its time of change and its inode number. For Python's own text
        it is Python's version. For a hub data set it is None.
        """
        return [_stamp(name) for name in self.files]

    def pieces(self, most_bytes: int | None = None) -> Iterator[Piece]:
        """Yield the documents in order, in pieces. `most_bytes` limits their size, approximately.

        With `most_bytes`, only some parts are read, spread evenly over all files. A larger `most_bytes` adds
        parts to those of a smaller one. The rows of a part can only be read in order, so at least one in
        `_ORDERED` of them is taken. If the size of a file is unknown, as it is compressed, all files are read
        from the beginning. If a file has a weight below 1, the same rows or passages are left out each time.
        Raises InputError for a file that cannot be read, and for more bad rows than `skip_bad_rows`.
        """
        read = 0
        tolerance = Tolerance(self.skip_bad_rows)
        selections = choose_parts(self._part_sizes, most_bytes)
        for name, share, selection in zip(self.files, self._shares, selections, strict=True):
            with named(name):
                for piece in self._pieces(name, share, selection, tolerance):
                    if most_bytes is not None and read >= most_bytes + PART_BYTES:
                        tolerance.tell()
                        return
                    read += len(piece.text)
                    yield piece
        tolerance.tell()

    def _pieces(
        self, name: str, share: float, selection: "Selection", tolerance: Tolerance
    ) -> Iterator[Piece]:
        """Yield the pieces of one file: its share of the selected parts."""
        if selection.is_empty:
            return
        if file_format(name) == "text":
            yield from _text_pieces(read_text(name, selection.parts), share)
            return
        rows = enumerate(_share_of(self._rows(name, selection.parts), share))
        drawn = (row for number, row in rows if evenly_spread(number) < selection.rows)
        yield from cut(read_documents(name, drawn, self.text_column, self.template, tolerance))

    def _rows(self, name: str, parts: list[int] | None) -> Iterator[Row]:
        if file_format(name) != "hub":
            yield from read_rows(name, parts, self._choose)
            return
        data_set = self._data_set(name)
        first = next(iter(data_set.with_format("arrow").iter(batch_size=1)), None)
        if first is None:
            return
        names = self._choose(first.column_names)
        number = 0
        for table in data_set.select_columns(names).with_format("arrow").iter(batch_size=256):
            for value in arrow_rows(table, names):
                number += 1
                yield Row(number, value)

    def _data_set(self, name: str) -> Any:
        from datasets import load_dataset

        if name not in self._data_sets:
            where = name.removeprefix("hub:")
            options: dict[str, Any] = {"split": "train", "revision": self.revision, "streaming": True}
            self._data_sets[name] = load_dataset(where, self.subset, **options)
        return self._data_sets[name]

    def _choose(self, present: Sequence[str]) -> list[str]:
        """The columns to read. Raises InputError if a needed one is not present."""
        columns = choose_columns(self.text_column, present)
        if columns is None:
            raise no_columns(self.text_column, present)
        return [name for name in columns.names if name in present]


def _text_pieces(stretches: Iterable[Stretch], share: float) -> Iterator[Piece]:
    """Yield a share of a text. A passage that does not follow the last one begins a new document."""
    end: int | None = None  # the byte after the last passage
    for stretch in stretches:
        follows = stretch.begin == end
        for text, is_taken in _passages(stretch, share):
            if is_taken and text:
                yield Piece(text, first=not follows)
            follows = is_taken and bool(text)
        end = stretch.end if follows else None


def _passages(stretch: Stretch, share: float) -> list[tuple[str, bool]]:
    """The passages of a stretch, each with whether to take it.

    The choice does not depend on what else of the file is read.
    """
    if share == 1.0:
        return [(stretch.text, True)]
    longest = min(_PASSAGE, len(stretch.text) // _FEWEST_PASSAGES + 2)
    texts = enumerate(split_at_words(stretch.text, longest), start=stretch.begin // _PASSAGE)
    return [(text, _is_in_share(number, share)) for number, text in texts]


def _share_of(items: Iterable[T], share: float) -> Iterator[T]:
    """Yield a share of the items, spread evenly over all of them. The first one is always included."""
    if share == 1.0:
        return iter(items)
    return (item for number, item in enumerate(items) if _is_in_share(number, share))


def _is_in_share(number: int, share: float) -> bool:
    """Whether item `number` belongs to this share of the items. Item 0 always does."""
    return evenly_spread(number - 1) < share


@dataclass(frozen=True)
class Selection:
    """Which parts of a file, and which share of their rows, are read."""

    parts: list[int] | None
    """The numbers of the parts. None means all of the file, in order."""
    rows: float = 1.0
    """The share of the rows of these parts that is read."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing of the file is read."""
        return self.parts == []


def choose_parts(sizes: Sequence[Sequence[int]], most_bytes: int | None) -> list[Selection]:
    """Choose what to read of each file, given the sizes of its parts, for about `most_bytes` in all.

    If the size of one file is unknown (it has no parts), all files are read in order.
    """
    if most_bytes is None:
        return [Selection(None)] * len(sizes)
    known = sum(map(sum, sizes)) if all(sizes) else None
    share = most_bytes / (known or most_bytes)
    count = sum(map(len, sizes))
    of_parts = min(1.0, max(share, _FEWEST_PARTS / max(1, count)))
    of_rows = max(share / of_parts, 1 / _ORDERED)
    selections = []
    passed = 0  # how many parts the earlier files have
    for parts in sizes:
        places = [number for number in range(len(parts)) if evenly_spread(passed + number) < of_parts]
        passed += len(parts)
        selections.append(Selection(places if share < 1.0 else None, of_rows))
    return selections


def evenly_spread(number: int) -> float:
    """Map each number to a point in [0, 1). The points of consecutive numbers spread evenly (Weyl)."""
    return (number + 1) * _GOLDEN_RATIO % 1.0


def find_corpus(name: str, **options: Any) -> Corpus:
    """Find the corpus that `name` means: a folder, file, URL, pattern, recipe, or `OWNER/NAME` on the hub.

    The options are fields of `Corpus`. Those that are not None replace the recipe's values and the defaults.
    Raises InputError if there is no such corpus.
    """
    path = Path(name)
    if path.is_file() and path.suffix == ".yaml":
        corpus = _read_recipe(path)
    elif path.is_file() or "://" in name:
        corpus = Corpus(files=(name,))
    elif kind := special_kind(name):
        raise InputError(f"{name} is a {kind}: write what it gives to a file, and give that")
    elif name and (path.is_dir() or is_pattern(name)):
        corpus = Corpus(files=find_files(name))
    elif name in recipes():
        corpus = _read_recipe(recipes()[name])
    elif is_hub_name(name):
        corpus = Corpus(files=(f"hub:{name}",))
    else:
        raise InputError(
            f"no corpus {name!r}: expected a text file, a folder, a pattern, a URL, OWNER/NAME of the "
            f"hub, or one of the recipes {', '.join(recipes())}"
        )
    if not corpus.files:
        raise InputError(f"no file matches {name}")
    given = {key: value for key, value in options.items() if value is not None}
    expected = corpus.sha256 or (None,) * len(corpus.files)
    return replace(corpus, files=tuple(map(_at_hand, corpus.files, expected)), **given)


def recipes() -> dict[str, Path]:
    """The YAML files of the recipes that come with the package, by name."""
    return {path.stem: path for path in sorted(shipped("recipes").glob("*.yaml"))}


def _read_recipe(path: Path) -> Corpus:
    try:
        if path.stat().st_size > _LARGEST_RECIPE:
            raise InputError(f"it has more than {_LARGEST_RECIPE:,} bytes")
        recipe = dict(parse_yaml(path.read_text(encoding="utf-8"))["corpus"])
        for name in ("files", "sha256", "weights"):
            values = recipe.get(name, ())
            recipe[name] = (values,) if isinstance(values, str | int | float) else tuple(values)
        return build(Corpus, {field.name: field.default for field in fields(Corpus)} | recipe)
    except (ValueError, TypeError, LookupError, OSError) as error:
        raise InputError(f"{path} is not a recipe: it needs a mapping under `corpus` ({error})") from error


def _stamp(name: str) -> object:
    kind = file_format(name)
    if kind == "builtin":
        return platform.python_version()
    if kind == "hub":
        return None
    status = os.stat(name)
    return status.st_size, status.st_mtime_ns, status.st_ino


def _at_hand(name: str, sha256: str | None) -> str:
    """Make a name of `Corpus.files` readable: a URL is downloaded once, and the copy's path returned."""
    if name.startswith(("builtin:", "hub:")):
        if sha256:
            raise InputError(f"{name} has no sha256: give the data set's revision, or leave sha256 out")
        return name
    if os.path.isfile(name):
        if is_binary(name):
            raise binary_error(name)
        _check_sha256(name, sha256)
        return name
    if "://" in name:
        return _download(name, sha256)
    raise InputError(f"{name} is not a file, or a link to one that is missing")


def _check_sha256(path: StrPath, expected: str | None, what: str = "") -> None:
    if expected and (found := file_sha256(path)) != expected:
        raise InputError(f"{what or path} has the SHA-256 {found}, the recipe expects {expected}")


def _download(url: str, sha256: str | None) -> str:
    protocol = url.partition("://")[0]
    if protocol not in _PROTOCOLS:  # with others, fsspec may evaluate templates that a file contains
        raise InputError(f"{url}: expected a path, or a URL of {', '.join(_PROTOCOLS)}")
    key = hashlib.sha256(url.encode()).hexdigest()[:16]
    file = Path(urlsplit(url).path).name[-_LONGEST_NAME:] or "text"  # its endings tell the format
    path = cache_folder() / "downloads" / key / file
    if path.is_file():
        _check_sha256(path, sha256, f"delete {path} to download it again: it")
        return str(path)
    import fsspec

    notice(f"downloading {url} to {path}")
    with atomic_write(path, "wb") as near:
        with named(url), fsspec.filesystem(protocol).open(url, "rb") as far:
            shutil.copyfileobj(far, near)
        near.flush()
        _check_sha256(near.name, sha256, url)
    return str(path)
