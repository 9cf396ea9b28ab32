"""Read a file as UTF-8 text in chunks, whatever its compression and byte order mark, or say why it is none.

Memory does not grow with the file. The messages of `read_text` follow the file's name, which `errors_named`
puts before them.
"""

import bz2
import gzip
import io
import lzma
import os
import shlex
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from gpt.data.formats import ARCHIVES, BINARY, COMPRESSED, ending_of, file_format
from gpt.data.read_errors import ERRORS_OF_BYTES, errors_named
from gpt.errors import InputError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

CHUNK_BYTES = 1 << 18
"""Size of a chunk of a file, which can be read without the chunks before it."""
_HEAD_BYTES = 1 << 13  # at the beginning of a file, which tell what it is
_LONGEST_LINE = 1 << 16  # bytes; a longer line of text is cut up
_SAMPLED = 4 << 20  # decompressed bytes from which the size of the whole file is estimated
_WESTERN = 0.2  # in Western European text at most this share of the bytes is beyond ASCII
_UNDEFINED = frozenset(b"\x81\x8d\x8f\x90\x9d")  # bytes without a meaning in Windows-1252
_BLANKS = " \t\r\n"
_TAR = slice(257, 262), b"ustar"  # the place of a mark in a tar file, and the mark
_MARKS = {  # byte order marks; a longer one comes before the shorter one that it begins with
    b"\xff\xfe\x00\x00": "utf-32",
    b"\x00\x00\xfe\xff": "utf-32",
    b"\xff\xfe": "utf-16",
    b"\xfe\xff": "utf-16",
}
ByteFile: TypeAlias = io.BufferedReader | gzip.GzipFile | bz2.BZ2File | lzma.LZMAFile
_Decompress: TypeAlias = Callable[[io.BufferedReader, Literal["rb"]], ByteFile]
_DECOMPRESSED: dict[str, _Decompress] = {".gz": gzip.open, ".bz2": bz2.BZ2File, ".xz": lzma.LZMAFile}


class Chunk(NamedTuple):
    """A chunk of a file: its text, and the bytes where it begins and ends."""

    begin: int
    end: int
    text: str


def read_text(name: str, chunks: Iterable[int] | None, longest: int = _LONGEST_LINE) -> Iterator[Chunk]:
    """Yield the chunks of a text file. With `chunks`, yield only those with these numbers.

    Chunk k begins with the first line that begins after byte k * CHUNK_BYTES. If none begins within `longest`
    bytes, the line is cut there. Raises InputError if the text is not UTF-8.
    """
    with opened(name) as file:
        position = 0  # the byte that is read next
        for number in count() if chunks is None else chunks:
            begin = number * CHUNK_BYTES
            end = (number + 1) * CHUNK_BYTES
            if chunks is not None and begin:  # without `chunks`, the one before was read to the end of a line
                position = file.seek(begin)
                position += len(_rest_of_line(file, longest))
            if position > end:  # a line that began earlier fills all of this chunk
                continue
            data = file.read(end - position) + _rest_of_line(file, longest)
            if not data:
                break
            try:
                text = data.decode()
            except UnicodeDecodeError as error:
                raise InputError(_not_utf8(name, data, error.start, position)) from None
            stop = position + len(data)
            yield Chunk(position, stop, text if position else text.removeprefix("\ufeff"))
            position = stop


def _rest_of_line(file: ByteFile, longest: int) -> bytes:
    """Read the rest of a line, or about `longest` bytes of it, up to the end of a character."""
    data = file.readline(longest)
    if data.endswith(b"\n"):
        return data
    for _ in range(3):  # the most bytes that can follow the first one of a character
        following = file.peek(1)[:1]
        if not following or following[0] & 0xC0 != 0x80:  # it begins a character
            break
        data += file.read(1)
    return data


def _not_utf8(name: str, data: bytes, place: int, position: int) -> str:
    """Return the message for text in another encoding. It gives the command that converts the text.

    It names Windows-1252 as the encoding where that is likely.
    """
    near = data[max(0, place - _HEAD_BYTES) : place + _HEAD_BYTES]
    foreign = sum(byte > 0x7F for byte in near)
    western = foreign < _WESTERN * len(near) and not _UNDEFINED.intersection(near)
    conversion = _conversion(name, "WINDOWS-1252" if western else "ENCODING")
    return f"is not UTF-8 text: byte {position + place} cannot be decoded; {conversion} converts it"


def _conversion(name: str, encoding: str) -> str:
    """Return the command that converts a file to UTF-8. A compressed one is decompressed first."""
    stem, ending = os.path.splitext(name)
    read = f"iconv -f {encoding} -t UTF-8 {shlex.quote(name)}"
    if is_compressed(name):
        read = f"{COMPRESSED[ending.lower()]} -dc {shlex.quote(name)} | iconv -f {encoding} -t UTF-8"
        stem, ending = os.path.splitext(stem)
    return f"{read} > {shlex.quote(f'{stem}-utf8{ending}')}"


@contextmanager
def opened(name: str) -> Iterator[ByteFile]:
    """Open a file as UTF-8 bytes. It is decompressed, and converted by its byte order mark."""
    with open(name, "rb") as stored:
        yield _as_utf8(name, stored)


def _as_utf8(name: str, stored: io.BufferedReader) -> ByteFile:
    """Return an open file, or a reader that decompresses it and converts it to UTF-8."""
    file = _decompressed(name, stored)
    encoding = head_of(name).encoding
    return io.BufferedReader(_Utf8(file, encoding), CHUNK_BYTES) if encoding else file


def _decompressed(name: str, stored: io.BufferedReader) -> ByteFile:
    return _DECOMPRESSED[_last_ending(name)](stored, "rb") if is_compressed(name) else stored


def is_compressed(name: str) -> bool:
    """Whether the file is compressed, according to its ending."""
    return _last_ending(name) in _DECOMPRESSED


def _last_ending(name: str) -> str:
    return os.path.splitext(name)[1].lower()


class _Utf8(io.RawIOBase):
    """A file in another encoding, read as UTF-8 bytes."""

    def __init__(self, file: ByteFile, encoding: str) -> None:
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
    read = 0
    with errors_named(name), open(name, "rb") as stored:
        text = _as_utf8(name, stored)
        while read < _SAMPLED:
            data = text.read(CHUNK_BYTES)
            if not data:
                return read
            read += len(data)
        return round(read * os.stat(name).st_size / stored.tell())


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
    data = _beginning(name)
    encoding = next((encoding for mark, encoding in _MARKS.items() if data.startswith(mark)), None)
    text = data.decode(encoding or "utf-8", "ignore").lstrip("\ufeff" + _BLANKS)
    return Head(encoding, b"\0" in data, text.startswith("["))


def _beginning(name: str) -> bytes:
    with open(name, "rb") as stored:
        return _decompressed(name, stored).read(_HEAD_BYTES)


def is_binary(name: str) -> bool:
    """Whether a file holds no text: by its ending, or a NUL byte in its first 8 KB. False for Parquet."""
    if file_format(name) not in ("text", "json", "csv"):
        return False
    if _last_ending(name) in BINARY:
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
    data = _beginning(name)
    place, mark = _TAR
    if ending_of(name) in ARCHIVES or data[place] == mark:
        return InputError(f"{name} is an archive: unpack it, and give the folder")
    for encoding, nul in (("UTF-16LE", data[1::2]), ("UTF-16BE", data[::2])):
        if nul and nul.count(0) > len(nul) / 2:
            what = f"{name} seems to be {encoding} without a byte order mark"
            return InputError(f"{what}: {_conversion(name, encoding)}")
    return InputError(f"{name} is binary: expected text, JSON lines, a JSON array, CSV or Parquet")
