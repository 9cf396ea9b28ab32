"""What a corpus is, and how it is named: a file, a folder, a hub data set, a recipe."""

import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from functools import cache
from glob import glob
from pathlib import Path
from typing import Any

from gpt.data import builtin
from gpt.data.documents import (
    PART_BYTES,
    Piece,
    cut,
    file_format,
    file_pieces,
    hub_rows,
    is_compressed,
    is_url,
    join,
    part_count,
)
from gpt.errors import InputError
from gpt.files import file_hashes, shipped
from gpt.plain import is_hub_name, parse_yaml
from gpt.progress import notice
from gpt.text.template import DEFAULT_TEMPLATE, Part, Template

_OF_THE_HUB = {"subset", "split", "revision", "streaming"}
_PROTOCOLS = ("https", "http", "s3", "gs", "hf")
_LARGEST_RECIPE = 1 << 16  # bytes
_GOLDEN_RATIO = (5**0.5 - 1) / 2
_BUILTIN = {"python-docs": builtin.python_docs, "python-stdlib": builtin.python_stdlib}


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Where documents come from: exactly one of `builtin`, `files` and `hub`; see `data/README.md`."""

    builtin: str | None = None
    files: tuple[str, ...] = ()  # paths or URLs
    hub: str | None = None
    subset: str | None = None
    split: str = "train"
    revision: str | None = None  # without one, prepared data is not updated when the hub's data set is
    streaming: bool = True
    text_column: str = "text"
    document_starts: str | None = None  # for a hub data set of lines: what a document's first row matches
    errors: str = "strict"
    template: Template = DEFAULT_TEMPLATE

    def __post_init__(self) -> None:
        if sum(map(bool, (self.builtin, self.files, self.hub))) != 1:
            raise InputError("a corpus needs exactly one of builtin, files and hub")
        if self.builtin and self.builtin not in _BUILTIN:
            raise InputError(f"unknown built-in corpus {self.builtin!r}, expected {' or '.join(_BUILTIN)}")
        for name in filter(is_url, self.files):
            if name.partition("://")[0] not in _PROTOCOLS or "::" in name:  # fsspec reads templates of others
                raise InputError(f"{name}: expected a path, or a URL of {', '.join(_PROTOCOLS)} without ::")
        if self.hub and not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", self.hub):
            raise InputError(f"{self.hub}: expected OWNER/NAME of a data set")
        if missing := [name for name in self.files if not is_url(name) and not os.path.isfile(name)]:
            raise InputError(f"{missing[0]} is not a file, or a link to one that is missing")
        if self.errors not in ("strict", "replace"):
            raise InputError(f"errors must be strict or replace, got {self.errors!r}")

    def fingerprint(self, most_bytes: int | None = None) -> str:
        """A hash of how it is read and of local files' content; of URLs and hub data sets only the names.

        Of files of which only `most_bytes` are read, which may be too large to hash, it is of their `stamps`.
        """
        options = asdict(self) | {"files": ["-"] if self.files else []}
        digest = hashlib.sha256(json.dumps(options).encode())
        if self.builtin:
            digest.update(builtin.library_fingerprint().encode())
        if most_bytes is not None and (self.size() or 0) > most_bytes:
            digest.update(json.dumps([self.files, self.stamps()]).encode())
            return digest.hexdigest()
        hashes = file_hashes(name for name in self.files if not is_url(name))
        for name in self.files:
            digest.update(f"{file_format(name)} {hashes.get(name, name)}\n".encode())
        return digest.hexdigest()

    def stamps(self) -> list[tuple[int, ...]]:
        """Size, time of change and inode of each local file that is there: an edit changes them."""
        found = [os.stat(name) for name in self.files if os.path.exists(name)]
        return [(status.st_size, status.st_mtime_ns, status.st_ino) for status in found]

    def size(self) -> int | None:
        """Bytes of the files; None if unknown before reading, as of what is compressed or far away."""
        known = not any(is_url(name) or is_compressed(name) for name in self.files)
        return sum(os.stat(name).st_size for name in self.files) if self.files and known else None

    def pieces(self, most_bytes: int | None = None) -> Iterator[Piece]:
        """The documents in order, in pieces; with `most_bytes`, parts of about so many bytes in all.

        Files are read at places spread over all of them, and with more bytes at the same places and others.
        What can only be read in order, such as a compressed file, is read from its beginning on.
        """
        read, example = 0, False
        for piece in self._pieces(most_bytes):
            example = not piece.scored if piece.first else example
            read += len(piece.text)
            if most_bytes is not None and read >= most_bytes + PART_BYTES and (piece.last or not example):
                yield piece._replace(last=True)
                return
            yield piece

    def _pieces(self, most_bytes: int | None) -> Iterator[Piece]:
        share = min(1.0, most_bytes / (self.size() or most_bytes)) if most_bytes else 1.0
        if self.builtin:
            texts = _builtin_texts(self.builtin)
            share = min(1.0, most_bytes / sum(map(len, texts))) if most_bytes else 1.0
            yield from cut([Part(text, True)] for i, text in enumerate(texts) if evenly_spread(i) < share)
        elif self.hub:
            options = {"split": self.split, "revision": self.revision, "streaming": self.streaming}
            rows = hub_rows(self.text_column, self.template, self.hub, self.subset, **options)
            yield from cut(join(rows, self.document_starts) if self.document_starts else rows)
        passed = 0
        for name in self.files:
            parts: list[int] | None = None
            if share < 1.0:
                count = part_count(name)
                parts = [part for part in range(count) if evenly_spread(passed + part) < share]
                passed += count
                if not parts:
                    continue
                parts = parts if count > 1 else None
            yield from file_pieces(name, self.text_column, self.errors, self.template, parts)


@cache
def _builtin_texts(name: str) -> list[str]:
    return list(_BUILTIN[name]())


def evenly_spread(number: int) -> float:
    """A place in [0, 1) for each number, such that any that follow one another are spread over it (Weyl)."""
    return (number + 1) * _GOLDEN_RATIO % 1.0


def find_corpus(name: str, **options: Any) -> Corpus:
    """The corpus that `name` stands for: a folder, file, URL, pattern or recipe, or the hub's `OWNER/NAME`.

    The options are fields of `Corpus` in place of the recipe's or the defaults, unless None.
    """
    path = Path(os.path.expanduser(name))  # which leaves the `~` of an unknown user
    found: dict[str, Any]
    if name and path.is_dir():
        found = {"files": _folder_files(path)}
    elif path.is_file() and path.suffix == ".yaml":
        found = _read_recipe(path)
    elif path.is_file() or is_url(name):
        found = {"files": (name if is_url(name) else str(path),)}
    elif any(mark in name for mark in "*?["):
        found = {"files": _matching_files(path)}
    elif name in recipes():
        found = _read_recipe(recipes()[name])
    elif is_hub_name(name):
        found = {"hub": name}
    else:
        raise InputError(
            f"no corpus {name!r}: expected a text file, a folder, a pattern, a URL, OWNER/NAME of the "
            f"hub, or one of the recipes {', '.join(recipes())}"
        )
    given = {key: value for key, value in options.items() if value is not None}
    if "hub" not in found and (unused := sorted(_OF_THE_HUB & given.keys())):
        raise InputError(f"{', '.join(unused)}: {name} is no hub data set, leave this out")
    return Corpus(**found | given)


def recipes() -> dict[str, Path]:
    """The YAML file of every recipe that comes with the package, by name."""
    return {path.stem: path for path in sorted(shipped("recipes").glob("*.yaml"))}


def _read_recipe(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _LARGEST_RECIPE:
            raise InputError(f"it has more than {_LARGEST_RECIPE:,} bytes")
        recipe = parse_yaml(path.read_text(encoding="utf-8"))
        corpus = {str(key): value for key, value in recipe["corpus"].items()}
        re.compile(corpus.get("document_starts") or "")
    except Exception as error:  # what YAML, its shape and the expression raise shares no class
        raise InputError(f"{path} is not a recipe: it needs a mapping under `corpus` ({error})") from error
    known = [field.name for field in fields(Corpus) if field.name != "template"]
    if unknown := sorted(set(corpus) - set(known)):
        raise InputError(f"{path}: unknown setting {', '.join(unknown)}, expected {', '.join(known)}")
    files = corpus.pop("files", [])
    files = files if isinstance(files, list) else [files]
    for value in [*files, *corpus.values()]:
        if not value or not isinstance(value, str | bool):
            raise InputError(
                f"{path}: expected texts, in quotation marks if they look like numbers: {value!r:.80}"
            )
    return {**corpus, "files": tuple(files)}


def _matching_files(pattern: Path) -> tuple[str, ...]:
    parent = os.path.dirname(pattern)
    if re.search(r"[*?[]", parent):  # `glob` skips a folder that it cannot read, `_walk` reports it
        list(_walk(Path(re.split(r"[^/]*[*?[]", parent)[0] or ".")))
    found = sorted(file for file in glob(str(pattern), recursive=True) if not os.path.isdir(file))
    if not found:
        raise InputError(f"no file matches {pattern}")
    return tuple(found)


def _folder_files(folder: Path) -> tuple[str, ...]:
    """The files of a folder that are not hidden; where they are rows, without the data set's card."""
    names = sorted(_walk(folder), key=lambda name: Path(name).parts)
    if not names:
        raise InputError(f"the folder {folder} has no files")
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


def _walk(folder: Path) -> Iterator[str]:
    """The files below `folder` that are not hidden, nor in hidden folders."""
    seen: dict[str, str] = {}
    for place, folders, files in os.walk(folder, onerror=_raise, followlinks=True):
        if (first := seen.setdefault(os.path.realpath(place), place)) != place:
            raise InputError(f"the folder {place} is a link to {first}: its files would be read twice")
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (os.path.join(place, name) for name in files if not name.startswith("."))


def _raise(error: OSError) -> None:
    raise InputError(f"cannot read the folder {error.filename}: {error.strerror}") from error
