"""What a corpus is, and how it is named: a file, a folder, a hub data set, a recipe."""

import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from glob import glob
from pathlib import Path
from typing import Any

from gpt.data import builtin
from gpt.data.documents import Piece, cut, join, read_documents
from gpt.data.formats import (
    PART_BYTES,
    ROWS_AT_ONCE,
    file_format,
    is_compressed,
    is_url,
    named,
    part_count,
    read_tables,
    read_text,
)
from gpt.errors import InputError
from gpt.files import file_hashes, shipped
from gpt.plain import build, is_hub_name, parse_yaml
from gpt.progress import notice
from gpt.text.template import DEFAULT_TEMPLATE, Part, Template

_PROTOCOLS = ("https", "http", "s3", "gs", "hf")
_LARGEST_RECIPE = 1 << 16  # bytes
_GOLDEN_RATIO = (5**0.5 - 1) / 2


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Where documents come from, and how they are read; see `data/README.md`."""

    files: tuple[str, ...] = ()
    """Paths, URLs, hub:OWNER/NAME, builtin:NAME."""
    subset: str | None = None
    split: str = "train"
    revision: str | None = None  # without one, prepared data is not updated when the hub's data set is
    streaming: bool = True
    text_column: str = "text"
    document_starts: str | None = None  # for a hub data set of lines: what a document's first row matches
    errors: str = "strict"
    template: Template = DEFAULT_TEMPLATE

    def __post_init__(self) -> None:
        if not self.files:
            raise InputError("a corpus needs files, hub or builtin")
        for name in self.files:
            kind, _, rest = name.partition(":")
            if kind == "builtin":
                if rest not in builtin.CORPORA:
                    expected = " or ".join(builtin.CORPORA)
                    raise InputError(f"unknown built-in corpus {rest!r}, expected {expected}")
            elif kind == "hub":
                if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", rest):
                    raise InputError(f"{rest}: expected OWNER/NAME of a data set")
            elif is_url(name):
                if kind not in _PROTOCOLS or "::" in name:  # fsspec reads templates of others
                    expected = ", ".join(_PROTOCOLS)
                    raise InputError(f"{name}: expected a path, or a URL of {expected} without ::")
            elif not os.path.isfile(name):
                raise InputError(f"{name} is not a file, or a link to one that is missing")
        if self.errors not in ("strict", "replace"):
            raise InputError(f"errors must be strict or replace, got {self.errors!r}")

    def fingerprint(self, most_bytes: int | None = None) -> str:
        """A hash of how it is read and of local files' content; of URLs and hub data sets only the names.

        Of files of which only `most_bytes` are read, which may be too large to hash, it is of their `stamps`.
        """
        known: list[Any] = [asdict(self) | {"files": []}]
        if any(name.startswith("builtin:") for name in self.files):
            known.append(builtin.library_fingerprint())
        if most_bytes is not None and (self.size() or 0) > most_bytes:
            known += [self.files, self.stamps()]
        else:
            hashes = file_hashes(filter(os.path.isfile, self.files))
            known += [[file_format(name), hashes.get(name, name)] for name in self.files]
        return hashlib.sha256(json.dumps(known).encode()).hexdigest()

    def stamps(self) -> list[tuple[int, ...]]:
        """Size, time of change and inode of each local file that is there: an edit changes them."""
        found = [os.stat(name) for name in self.files if os.path.exists(name)]
        return [(status.st_size, status.st_mtime_ns, status.st_ino) for status in found]

    def size(self) -> int | None:
        """Bytes of the files; None if unknown before reading, as of what is compressed or far away."""
        known = all(os.path.isfile(name) and not is_compressed(name) for name in self.files)
        return sum(os.stat(name).st_size for name in self.files) if known else None

    def pieces(self, most_bytes: int | None = None) -> Iterator[Piece]:
        """The documents in order, in pieces; with `most_bytes`, parts of about so many bytes in all.

        Files are read at places spread over all of them, and with more bytes at the same places and others.
        What can only be read in order, such as a compressed file, is read from its beginning on.
        """
        read, example = 0, False
        for piece in self._pieces(most_bytes):
            enough = most_bytes is not None and read >= most_bytes + PART_BYTES
            if enough and (piece.first or not example):
                return
            example = not piece.scored if piece.first else example
            read += len(piece.text)
            yield piece

    def _pieces(self, most_bytes: int | None) -> Iterator[Piece]:
        share = most_bytes / (self.size() or most_bytes) if most_bytes else 1.0
        passed = 0
        for name in self.files:
            kind, _, rest = name.partition(":")
            with named(name.removeprefix("hub:")):
                parts: list[int] | None = None
                if share < 1.0:
                    first, passed = passed, passed + part_count(name)
                    parts = [part - first for part in range(first, passed) if evenly_spread(part) < share]
                if parts == []:
                    continue
                if kind == "builtin":
                    yield from cut([Part(text, True)] for text in _builtin(rest, most_bytes))
                elif kind != "hub" and file_format(name) == "text":
                    for number, text in enumerate(read_text(name, self.errors, parts)):
                        yield Piece(text, first=not number)
                else:
                    tables = self._hub(rest) if kind == "hub" else read_tables(name, self.errors, parts)
                    rows = read_documents(tables, self.text_column, self.template)
                    yield from cut(join(rows, self.document_starts) if self.document_starts else rows)

    def _hub(self, path: str) -> Iterator[Any]:
        """The rows of a data set, many at once in tables of Arrow."""
        from datasets import load_dataset

        options: Any = {"split": self.split, "revision": self.revision, "streaming": self.streaming}
        found = load_dataset(path, self.subset, **options)
        yield from found.with_format("arrow").iter(batch_size=ROWS_AT_ONCE)


def _builtin(name: str, most_bytes: int | None) -> list[str]:
    texts = builtin.texts(name)
    share = most_bytes / sum(map(len, texts)) if most_bytes else 1.0
    return [text for number, text in enumerate(texts) if evenly_spread(number) < share]


def evenly_spread(number: int) -> float:
    """A place in [0, 1) for each number, such that any that follow one another are spread over it (Weyl)."""
    return (number + 1) * _GOLDEN_RATIO % 1.0


def find_corpus(name: str, **options: Any) -> Corpus:
    """The corpus that `name` stands for: a folder, file, URL, pattern or recipe, or the hub's `OWNER/NAME`.

    The options are fields of `Corpus` in place of the recipe's or the defaults, unless None.
    """
    name = os.path.expanduser(name)  # which leaves the `~` of an unknown user
    path = Path(name)
    found: dict[str, Any]
    if name and path.is_dir():
        found = {"files": _folder_files(path)}
    elif path.is_file() and path.suffix == ".yaml":
        found = _read_recipe(path)
    elif path.is_file() or is_url(name):
        found = {"files": (name,)}
    elif any(mark in name for mark in "*?["):
        root, pattern = re.match(r"([^*?[]*/)?(.*)", name).groups("")  # type: ignore[union-attr]
        found = {"files": tuple(sorted(_matching(root, pattern)))}
    elif name in recipes():
        found = _read_recipe(recipes()[name])
    elif is_hub_name(name):
        found = {"files": (f"hub:{name}",)}
    else:
        raise InputError(
            f"no corpus {name!r}: expected a text file, a folder, a pattern, a URL, OWNER/NAME of the "
            f"hub, or one of the recipes {', '.join(recipes())}"
        )
    return Corpus(**found | {key: value for key, value in options.items() if value is not None})


def recipes() -> dict[str, Path]:
    """The YAML file of every recipe that comes with the package, by name."""
    return {path.stem: path for path in sorted(shipped("recipes").glob("*.yaml"))}


def _read_recipe(path: Path) -> dict[str, Any]:
    """The fields of a `Corpus` that a recipe sets."""
    try:
        if path.stat().st_size > _LARGEST_RECIPE:
            raise InputError(f"it has more than {_LARGEST_RECIPE:,} bytes")
        recipe = dict(parse_yaml(path.read_text(encoding="utf-8"))["corpus"])
        files = recipe.pop("files", [])
        files = [files] if isinstance(files, str) else list(map(str, files))
        files += [f"{kind}:{recipe.pop(kind)}" for kind in ("hub", "builtin") if kind in recipe]
        recipe["files"] = tuple(files)
        re.compile(recipe.get("document_starts", ""))
        build(Corpus, {field.name: field.default for field in fields(Corpus)} | recipe)
    except Exception as error:  # what YAML, its shape and the expression raise shares no class
        raise InputError(f"{path} is not a recipe: it needs a mapping under `corpus` ({error})") from error
    return recipe


def _matching(root: str, pattern: str) -> list[str]:
    """The files in a folder that match a pattern, none of them hidden."""
    seen: dict[str, str] = {}
    if os.path.dirname(pattern):  # `glob` skips folders that it cannot read
        for place, folders, _ in os.walk(Path(root), onerror=_raise, followlinks=True):
            if (first := seen.setdefault(os.path.realpath(place), place)) != place:
                raise InputError(f"the folder {place} is a link to {first}: its files would be read twice")
            folders[:] = [name for name in folders if not name.startswith(".")]
    found = [root + name for name in glob(pattern, root_dir=root or None, recursive=True)]
    found = [name for name in found if not os.path.isdir(name)]
    if not found:
        raise InputError(f"no file matches {root}{pattern}")
    return found


def _folder_files(folder: Path) -> tuple[str, ...]:
    """The files of a folder that are not hidden; where they are rows, without the data set's card."""
    names = sorted(_matching(f"{folder}/", "**/*"), key=lambda name: Path(name).parts)
    texts = [name for name in names if file_format(name) == "text"]
    rows = [name for name in names if file_format(name) != "text"]
    others = [name for name in texts if not Path(name).name.upper().startswith(("README", "LICENSE"))]
    if rows and others:
        raise InputError(
            f"the folder {folder} mixes files of rows ({rows[0]}) with texts ({others[0]}): "
            f"name one kind with a pattern, such as '{folder}/**/*{Path(others[0]).suffix}'"
        )
    if rows and texts:
        notice(f"left out {', '.join(texts)}: the other files of {folder} are rows")
    return tuple(rows or texts)


def _raise(error: OSError) -> None:
    raise InputError(f"cannot read the folder {error.filename}: {error.strerror}") from error
