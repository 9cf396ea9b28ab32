"""Where the files that come with the package are, and writing a file so that no reader sees half of it."""

import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from gpt.errors import InputError

StrPath = str | os.PathLike[str]
_PACKAGE = Path(__file__).parent


def shipped(folder: str) -> Path:
    """`assets`, `configs` or `recipes` of a wheel, or of a checkout, where `recipes` is called `data`."""
    project = _PACKAGE.parent / "pyproject.toml"
    found = _PACKAGE / folder
    in_checkout = project.is_file() and 'name = "minimal-gpt"' in project.read_text(encoding="utf-8")
    if not found.is_dir() and in_checkout:  # elsewhere, a folder beside the package is someone else's
        found = _PACKAGE.parent / {"recipes": "data"}.get(folder, folder)
    if not found.is_dir():
        raise InputError(f"this installation has no {folder}: install minimal-gpt again")
    return found


def cache_folder() -> Path:
    """`$GPT_CACHE`, or `minimal-gpt` in the user's cache folder."""
    if chosen := os.environ.get("GPT_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minimal-gpt"


@contextmanager
def atomic_write(path: StrPath, mode: str = "w") -> Iterator[IO[Any]]:
    """Open a temporary file beside `path`; when the block succeeds, flush it to disk and rename it to `path`.

    If the block raises, or the disk is full (OSError), the temporary file is deleted and `path` unchanged.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if os.name != "nt":  # makes the rename durable; Windows has no such call and needs none
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def file_sha256(path: StrPath) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def write_json(path: StrPath, value: Any) -> None:
    """Write indented JSON, atomically. File names that are not UTF-8 come back as they were."""
    with atomic_write(path, "wb") as file:  # backslashreplace writes half a surrogate pair as JSON escapes it
        file.write(f"{json.dumps(value, indent=2, ensure_ascii=False)}\n".encode("utf-8", "backslashreplace"))


def check_free(path: Path) -> None:
    """An InputError where an output would replace something; an empty folder may be filled."""
    if any(path.iterdir()) if path.is_dir() else os.path.lexists(path):
        raise InputError(f"{path} exists already: choose another name")
