"""Find a corpus by its name: a file, a folder, a pattern, a URL, a hub data set or a corpus file."""

import hashlib
import os
import shutil
from dataclasses import fields, replace
from pathlib import Path
from urllib.parse import urlsplit

from gpt.data import builtin
from gpt.data.corpus import Corpus
from gpt.data.folders import find_files, is_pattern, special_kind
from gpt.data.formats import has_file_ending
from gpt.data.options import DEFAULT_READING, Reading
from gpt.data.read_errors import network_errors_named
from gpt.data.text_file import binary_error, is_binary
from gpt.errors import InputError, did_you_mean
from gpt.files import StrPath, atomic_write, cache_folder, file_sha256, shipped
from gpt.plain import JsonObject, build_known, is_hub_name, parse_yaml, shown
from gpt.progress import notice

_PROTOCOLS = ("https", "http", "s3", "gs", "hf")
_LARGEST_FILE = 1 << 16  # bytes
_LONGEST_NAME = 50  # characters, of at most 4 bytes: a file's name has at most 255 bytes


def find_corpus(name: str, reading: Reading = DEFAULT_READING) -> Corpus:
    """Find what `name` means: a folder, file, URL, pattern, corpus file, or `OWNER/NAME` on the hub.

    The columns and bad rows of `reading` replace a corpus file's values. Raises InputError if there is no
    such corpus.
    """
    corpus = named_corpus(name)
    if not corpus.files:
        raise InputError(f"no file matches {name}")
    expected = corpus.sha256 or (None,) * len(corpus.files)
    return replace(
        corpus,
        files=tuple(map(_readable_file, corpus.files, expected)),
        text_column=corpus.text_column if reading.text_column is None else reading.text_column,
        skip_bad_rows=corpus.skip_bad_rows if reading.skip_bad_rows is None else reading.skip_bad_rows,
        template=reading.template,
    )


def check_exists(name: str) -> None:
    """Raise InputError if there is no corpus of this name. No file is opened, and the hub is not asked."""
    path = Path(name)
    is_here = bool(name) and path.exists()
    is_on_hub = is_hub_name(name) and not has_file_ending(name)
    if is_here or "://" in name or is_pattern(name) or name in shipped_corpora() or is_on_hub:
        return
    expected = (
        ": expected a text file, a folder, a pattern, a URL, OWNER/NAME of the hub, or one of the corpora "
        f"{', '.join(shipped_corpora())}"
    )
    raise InputError(f"no corpus {name!r}{_suggestion(path) or expected}")


def named_corpus(name: str) -> Corpus:
    """Return the corpus of this name, whose files may still have to be downloaded."""
    check_exists(name)
    path = Path(name)
    if path.is_file() and path.suffix == ".yaml":
        return _read_corpus_file(path)
    if path.is_file() or "://" in name:
        return Corpus(files=(name,))
    if kind := special_kind(name):
        raise InputError(f"{name} is a {kind}: write what it gives to a file, and give that")
    if path.is_dir() or is_pattern(name):
        return Corpus(files=find_files(name))
    if name in shipped_corpora():
        return _read_corpus_file(shipped_corpora()[name])
    return Corpus(files=(f"hub:{name}",))


def _suggestion(path: Path) -> str:
    """Return a question that suggests a file or folder in the same place of a similar name; "" if none is."""
    try:
        names = os.listdir(path.parent)
    except OSError:
        return ""
    return did_you_mean(
        path.name, names, before=": ", shown=lambda near: str(path.with_name(near)), likeness=0.8
    )


def shipped_corpora() -> dict[str, Path]:
    """Return the corpus files that come with the package, by name."""
    return {path.stem: path for path in sorted(shipped("recipes").glob("*.yaml"))}


def _read_corpus_file(path: Path) -> Corpus:
    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise InputError(f"it has more than {_LARGEST_FILE:,} bytes")
        content = parse_yaml(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or not isinstance(content.get("corpus"), dict):
            raise InputError("it needs a mapping under `corpus`")
        corpus, _ = build_known(Corpus, _checked(content["corpus"]))
    except (ValueError, TypeError, OSError) as error:
        raise InputError(f"{path} is not a corpus file: {error}") from error
    return replace(corpus, files=tuple(_here_or_beside(path, name) for name in corpus.files))


def _checked(recipe: JsonObject) -> JsonObject:
    """Return the keys of a corpus file, with tuples for its lists; InputError for one that no field has."""
    known = [field.name for field in fields(Corpus) if field.name != "template"]
    for key in map(str, recipe):
        if key not in known:
            expected = did_you_mean(key, known, before=": ") or f": expected {', '.join(known)}"
            raise InputError(f"its corpus has no key {shown(key)}{expected}")
    if "files" not in recipe:
        raise InputError("it names no files")
    checked = dict(recipe)
    for name in ("files", "sha256", "weights"):
        values = recipe.get(name, ())
        checked[name] = (values,) if isinstance(values, str | int | float) else tuple(values)
    return checked


def _here_or_beside(corpus_file: Path, name: str) -> str:
    """Return the name of a file in a corpus file; a path beside it if there is a file, and none here."""
    beside = corpus_file.parent / name
    return str(beside) if beside.exists() and not os.path.exists(name) else name


def _readable_file(name: str, sha256: str | None) -> str:
    """Return a name in `Corpus.files` that can be read: for a URL, the path of a copy, downloaded once.

    Raises InputError if there is no such file, if it is binary, or if it has another hash.
    """
    if name.startswith(("builtin:", "hub:")):
        if sha256:
            raise InputError(f"{name} has no sha256: give the data set's revision, or leave sha256 out")
        if name.startswith("builtin:") and name not in builtin.NAMES:
            raise InputError(f"there is no {name}, expected one of {', '.join(builtin.NAMES)}")
        return name
    is_here = os.path.isfile(name)
    if is_here:
        path = name
    elif "://" in name:
        path = _download(name, sha256)
    else:
        raise InputError(f"{name} is not a file, or a link to one that is missing")
    if is_binary(path):
        raise binary_error(path)
    if is_here:  # the hash of a download is checked before the copy is kept
        _check_sha256(name, sha256)
    return path


def _check_sha256(path: StrPath, expected: str | None, what: str = "") -> None:
    if expected is None:
        return
    actual = file_sha256(path)
    if actual != expected:
        raise InputError(f"{what or path} has the SHA-256 {actual}, the corpus file expects {expected}")


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
        with network_errors_named(url), fsspec.filesystem(protocol).open(url, "rb") as far:
            shutil.copyfileobj(far, near)
        near.flush()
        _check_sha256(near.name, sha256, url)
    return str(path)
