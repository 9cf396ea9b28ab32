"""Find the files that come with the package, and write files atomically."""

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from gpt.errors import InputError
from gpt.home import ensure_home

StrPath = str | os.PathLike[str]
_OPENS_FOLDERS = os.open in os.supports_dir_fd  # False on Windows
# Follow no links, do not wait for a pipe's reader, and keep line ends. Not every system has all three flags.
_PLAIN = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"))
_UNKNOWN_CALL = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
_IS_LOCKED = {errno.EAGAIN, errno.EWOULDBLOCK, errno.EACCES, errno.EDEADLK}
_HAS_NO_LINKS = {*_UNKNOWN_CALL, errno.EPERM, errno.EMLINK, errno.EXDEV}


def shipped(folder: str, package: Path = Path(__file__).parent) -> Path:
    """Return the folder `assets`, `configs` or `recipes` of the package; a checkout calls the last `data`."""
    project = package.parent / "pyproject.toml"
    path = package / folder
    in_checkout = project.is_file() and 'name = "minimal-gpt"' in project.read_text(encoding="utf-8")
    if not path.is_dir() and in_checkout:  # elsewhere it may be another project's
        path = package.parent / {"recipes": "data"}.get(folder, folder)
    if not path.is_dir():
        raise InputError(f"this installation has no {folder}: install minimal-gpt again")
    return path


def cache_folder() -> Path:
    """Return `$GPT_CACHE`, or `minimal-gpt` in the user's cache folder."""
    if chosen := os.environ.get("GPT_CACHE"):
        return Path(chosen)
    ensure_home()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minimal-gpt"


class Folder:
    """An open folder, whose files are opened, written and renamed by their plain names.

    The path to the folder may contain links, but no link inside the folder is followed. Files are written
    into this very folder even if its path leads elsewhere meanwhile. Windows cannot open folders; there,
    names are joined to the path.
    """

    def __init__(self, path: StrPath, descriptor: int | None = None) -> None:
        """Open the folder at `path`, or use the descriptor of a folder that is open already."""
        self.path = Path(path)
        if descriptor is None and _OPENS_FOLDERS:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        self._descriptor = descriptor

    def __enter__(self) -> "Folder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the descriptor; the object cannot be used afterwards."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def below(self, name: str) -> "Folder":
        """Return the folder of this name inside, made if missing; InputError for a link or a file."""
        with self._errors_of(name):
            with suppress(FileExistsError):
                os.mkdir(self._at(name), dir_fd=self._descriptor)
                self.sync()
            if stat.S_ISDIR(self._status(name).st_mode):
                flags = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | _PLAIN
                opened = os.open(name, flags, dir_fd=self._descriptor) if _OPENS_FOLDERS else None
                return Folder(self.path / name, opened)
        raise InputError(f"{self.path / name} is a link or a file, expected a folder: move it away")

    def names(self) -> list[str]:
        """Return the names of all entries."""
        return sorted(os.listdir(self.path if self._descriptor is None else self._descriptor))

    def is_file(self, name: str) -> bool:
        """Whether this is a plain file, not a link or a pipe."""
        try:
            return stat.S_ISREG(self._status(name).st_mode)
        except FileNotFoundError:
            return False

    def open(self, name: str, flags: int = os.O_RDONLY) -> int:
        """Open a plain file and return its descriptor; InputError for a link, a pipe or a device."""
        with self._errors_of(name):
            try:
                descriptor = os.open(self._at(name), flags | _PLAIN, 0o666, dir_fd=self._descriptor)
            except OSError as error:
                if error.errno not in (errno.ELOOP, errno.ENXIO):  # for a link; for a pipe without a reader
                    raise
                raise self._not_plain(name) from None
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise self._not_plain(name)
        return descriptor

    def read(self, name: str) -> bytes:
        """Return the content of a plain file; raises the errors of `open`."""
        with os.fdopen(self.open(name), "rb") as file:
            return file.read()

    @contextmanager
    def write(self, name: str, mode: str = "w") -> Iterator[IO[Any]]:
        """Write a file in this folder like `atomic_write`."""
        temporary = self._temporary()
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | _PLAIN
        with self._errors_of(name):
            descriptor = os.open(self._at(temporary), flags, 0o666, dir_fd=self._descriptor)
        try:
            encoding = None if "b" in mode else "utf-8"
            # The name is for libraries that cannot write to an open file.
            with open(self.path / temporary, mode, encoding=encoding, opener=lambda *_: descriptor) as file:
                yield file
                with self._errors_of(name):
                    file.flush()
                    os.fsync(file.fileno())
            self.rename(temporary, name)
        except BaseException:
            self.remove(temporary)
            raise
        self.sync()

    def also_called(self, name: str, new: str, where: "Folder | None" = None) -> None:
        """Give a plain file a second name, here or in another folder; replace any file of that name.

        The replacement is atomic: the new name always refers to the old file or to this one. Where the file
        system has no hard links, the file is copied.
        """
        where = where or self
        temporary = self._temporary()
        with self._errors_of(name):
            try:
                there = where._descriptor
                os.link(self._at(name), where._at(temporary), src_dir_fd=self._descriptor, dst_dir_fd=there)
            except OSError as error:
                if error.errno not in _HAS_NO_LINKS:
                    raise
                with os.fdopen(self.open(name), "rb") as old, where.write(new, "wb") as file:
                    shutil.copyfileobj(old, file, 1 << 20)
                return
        where.rename(temporary, new)
        where.remove(temporary)  # rename leaves it if both names were the same file

    def rename(self, name: str, new: str) -> None:
        """Rename a file, or a link itself; replace any file of the new name."""
        here = self._descriptor
        with self._errors_of(new):
            os.replace(self._at(name), self._at(new), src_dir_fd=here, dst_dir_fd=here)

    def remove(self, name: str) -> None:
        """Remove a file or a link, if it exists."""
        with self._errors_of(name), suppress(FileNotFoundError):
            os.unlink(self._at(name), dir_fd=self._descriptor)

    def remove_unfinished(self) -> None:
        """Remove temporary files that a killed `write` has left, also those of earlier versions."""
        for name in self.names():
            if re.fullmatch(r"\..*\.tmp|\.tmp\w{6}", name):
                self.remove(name)

    def sync(self) -> None:
        """Flush renames to the disk, where the file system supports this for folders."""
        if self._descriptor is None:  # Windows does not need it
            return
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            if error.errno not in _UNKNOWN_CALL:
                raise

    def _status(self, name: str) -> os.stat_result:
        return os.stat(self._at(name), dir_fd=self._descriptor, follow_symlinks=False)

    def _at(self, name: str) -> str:
        return name if self._descriptor is not None else str(self.path / name)

    def _not_plain(self, name: str) -> InputError:
        return InputError(f"{self.path / name} is a link or no file, expected a plain file: move it away")

    @staticmethod
    def _temporary() -> str:
        return f".{secrets.token_hex(8)}.tmp"  # a name may have the maximum length already

    @contextmanager
    def _errors_of(self, name: str) -> Iterator[None]:
        """Make the system's errors name the whole path instead of the plain name."""
        try:
            yield
        except OSError as error:
            if error.errno is None or (error.filename and os.path.dirname(error.filename)):
                raise
            raise OSError(error.errno, error.strerror, str(self.path / name)) from error


def make_folder(path: StrPath) -> None:
    """Make a folder and its missing parents, and flush them to the disk."""
    path = Path(path)
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        with Folder(folder.parent) as above:
            above.sync()


@contextmanager
def atomic_write(path: StrPath, mode: str = "w") -> Iterator[IO[Any]]:
    """Open a temporary file beside `path`; when the block succeeds, flush it to disk and rename it to `path`.

    The mode is "w" for text in UTF-8, or "wb" for bytes.
    If the block raises, or the disk is full (OSError), the temporary file is deleted and `path` is unchanged.
    """
    path = Path(path)
    make_folder(path.parent)
    with Folder(path.parent) as folder, folder.write(path.name, mode) as file:
        yield file


def file_sha256(path: StrPath) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def write_json(path: StrPath, value: object) -> None:
    """Write indented JSON atomically. File names that are not UTF-8 survive a round trip."""
    with atomic_write(path, "wb") as file:  # backslashreplace escapes a lone surrogate as JSON does
        file.write(f"{json.dumps(value, indent=2, ensure_ascii=False)}\n".encode("utf-8", "backslashreplace"))


def check_free(path: Path) -> None:
    """Raise InputError if an output would replace something; an empty folder may be filled."""
    if any(path.iterdir()) if path.is_dir() else os.path.lexists(path):
        raise InputError(f"{path} exists already: choose another name")


def readable(name: str) -> str:
    """Return a name as valid text, in which bytes that are not UTF-8 are escaped, as in `run\\udcff`."""
    return name.encode("utf-8", "backslashreplace").decode("utf-8")


def lock(descriptor: int, *, wait: bool = False) -> bool:
    """Lock an open file until the process ends; return False if the file system has no locks.

    Raises BlockingIOError if another process holds the lock, unless `wait` is set.
    """
    try:
        _lock(descriptor, wait)
    except OSError as error:
        if error.errno in _IS_LOCKED:
            raise BlockingIOError(error.errno, error.strerror) from None
        if error.errno not in {*_UNKNOWN_CALL, errno.ENOLCK}:
            raise
        return False
    return True


@contextmanager
def locked(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Hold the lock of a plain file during the block; yield whether the file system has locks.

    The file is made if missing. Raises BlockingIOError if another process holds the lock, unless `wait`
    is set.
    """
    with Folder(path.parent) as folder:
        descriptor = folder.open(path.name, os.O_RDWR | os.O_CREAT)
    try:
        yield lock(descriptor, wait=wait)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, wait: bool) -> None:
    if sys.platform == "win32":
        import msvcrt

        while True:
            try:
                msvcrt.locking(descriptor, msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
                return
            except OSError as error:
                if not wait or error.errno not in _IS_LOCKED:  # Windows gives up after ten seconds
                    raise
    else:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
