"""Open a file as UTF-8 bytes, whatever its compression and byte order mark, or say that it has no text."""

import bz2
import gzip
import io
import lzma
import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeAlias

from gpt.data.formats import ARCHIVES, BINARY, COMPRESSED, ending_of, file_format
from gpt.data.read_errors import ERRORS_OF_BYTES, errors_named
from gpt.errors import InputError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

CHUNK_BYTES = 1 << 18
"""Size of a chunk of a file, which can be read without the chunks before it."""
HEAD_BYTES = 1 << 13
"""Bytes at the beginning that tell what a file is."""
_Opened: TypeAlias = io.BufferedReader | gzip.GzipFile | bz2.BZ2File | lzma.LZMAFile
_Decompress: TypeAlias = Callable[[str | io.BufferedReader, Literal["rb"]], _Opened]
_DECOMPRESSED: dict[str, _Decompress] = {".gz": gzip.open, ".bz2": bz2.BZ2File, ".xz": lzma.LZMAFile}
_BLANKS = " \t\r\n"
_SAMPLED = 4 << 20  # decompressed bytes from which the size of the whole file is estimated
_TAR = slice(257, 262), b"ustar"  # the place of a mark in a tar file, and the mark
_MARKS = {  # byte order marks; a longer one comes before the shorter one that it begins with
    b"\xff\xfe\x00\x00": "utf-32",
    b"\x00\x00\xfe\xff": "utf-32",
    b"\xff\xfe": "utf-16",
    b"\xfe\xff": "utf-16",
}


class ByteFile(Protocol):
    """An open file of bytes, also a compressed one."""

    def read(self, size: int, /) -> bytes:
        """Read at most `size` bytes; none at the end."""

    def readline(self, size: int, /) -> bytes:
        """Read the rest of a line, but at most `size` bytes."""

    def peek(self, size: int, /) -> bytes:
        """Return the next bytes without reading them."""

    def seek(self, offset: int, /) -> int:
        """Go to a byte, counted from the beginning of the file, and return its number."""


def _decompress_of(name: str) -> _Decompress | None:
    """Return the function that decompresses a file, by its ending; None for one that is not compressed."""
    return _DECOMPRESSED.get(os.path.splitext(name.lower())[1])


def is_compressed(name: str) -> bool:
    """Whether the file is compressed, according to its ending."""
    return _decompress_of(name) is not None


def _open(name: str) -> _Opened:
    """Open a file of bytes, which is decompressed while it is read if its ending says so."""
    decompress = _decompress_of(name)
    return open(name, "rb") if decompress is None else decompress(name, "rb")


class Head(NamedTuple):
    """The facts about a file that its first 8 KB, decompressed, tell."""

    encoding: str | None
    """The encoding that its byte order mark says, None without a mark or for UTF-8."""
    has_nul: bool
    is_array: bool
    """Whether it begins with a JSON array."""


def head_of(name: str) -> Head:
    """Return the `Head` of a file. It is cached until the file changes."""
    status = os.stat(name)
    return _head_of(name, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=1 << 14)
def _head_of(name: str, size: int, changed: int) -> Head:
    with _open(name) as file:
        data = file.read(HEAD_BYTES)
    encoding = next((encoding for mark, encoding in _MARKS.items() if data.startswith(mark)), None)
    text = data.decode(encoding or "utf-8", "ignore").lstrip("\ufeff" + _BLANKS)
    return Head(encoding, b"\0" in data, text.startswith("["))


def is_binary(name: str) -> bool:
    """Whether a file holds no text: by its ending, or a NUL byte in its first 8 KB. False for Parquet."""
    if file_format(name) not in ("text", "json", "csv"):
        return False
    if os.path.splitext(name)[1].lower() in BINARY:
        return True
    try:
        head = head_of(name)
    except ERRORS_OF_BYTES:  # the error is reported when the file is read
        return False
    return head.has_nul and head.encoding is None


def binary_error(name: str) -> InputError:
    """Return the error for a binary file.

    It says so if the file is an archive, or seems to be UTF-16 without a byte order mark.
    """
    with _open(name) as file:
        data = file.read(HEAD_BYTES)
    place, mark = _TAR
    if ending_of(name) in ARCHIVES or data[place] == mark:
        return InputError(f"{name} is an archive: unpack it, and give the folder")
    for encoding, nul in (("UTF-16LE", data[1::2]), ("UTF-16BE", data[::2])):
        if nul and nul.count(0) > len(nul) / 2:
            return InputError(
                f"{name} seems to be {encoding} without a byte order mark: {convert(name, encoding)}"
            )
    return InputError(f"{name} is binary: expected text, JSON lines, a JSON array, CSV or Parquet")


@contextmanager
def opened(name: str) -> Iterator[ByteFile]:
    """Open a file as UTF-8 bytes, with `peek`. It is decompressed, and converted by its byte order mark."""
    with _open(name) as file:
        yield _as_utf8(name, file)


def _as_utf8(name: str, file: _Opened) -> ByteFile:
    """Return the open file, or a reader that converts it to UTF-8 by its byte order mark."""
    encoding = head_of(name).encoding
    return io.BufferedReader(_Utf8(file, encoding), CHUNK_BYTES) if encoding else file


class _Utf8(io.RawIOBase):
    """A file in another encoding, read as UTF-8 bytes."""

    def __init__(self, file: _Opened, encoding: str) -> None:
        self._text = io.TextIOWrapper(file, encoding, newline="")
        self._left = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int:
        """Read bytes into a buffer and return how many; 0 at the end of the file."""
        target = memoryview(buffer)
        self._left = self._left or self._text.read(CHUNK_BYTES).encode()
        size = min(len(target), len(self._left))
        target[:size] = self._left[:size]
        self._left = self._left[size:]
        return size


def estimated_bytes(name: str) -> int:
    """Estimate a file's bytes, decompressed and in UTF-8, from its first 4 MB. A shorter one is exact."""
    size = os.stat(name).st_size
    read = 0
    with errors_named(name), open(name, "rb") as raw:
        decompress = _decompress_of(name)
        text = _as_utf8(name, raw if decompress is None else decompress(raw, "rb"))
        while read < _SAMPLED:
            data = text.read(CHUNK_BYTES)
            if not data:
                return read
            read += len(data)
        return round(read * size / raw.tell())


def convert(name: str, encoding: str) -> str:
    """Return the command that converts a file to UTF-8. A compressed one is decompressed first."""
    stem, ending = os.path.splitext(name)
    iconv = f"iconv -f {encoding} -t UTF-8"
    if ending.lower() not in COMPRESSED:
        return f"{iconv} {shlex.quote(name)} > {shlex.quote(f'{stem}-utf8{ending}')}"
    program = COMPRESSED[ending.lower()]
    stem, ending = os.path.splitext(stem)
    return f"{program} -dc {shlex.quote(name)} | {iconv} > {shlex.quote(f'{stem}-utf8{ending}')}"
