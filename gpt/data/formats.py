"""Find out the format, compression and encoding of a file, and read its text.

A text is read in chunks, so memory does not grow with the file. The messages of InputErrors follow the file's
name, which `errors_named` puts before them.
"""

import bz2
import gzip
import io
import lzma
import os
import shlex
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeAlias

from gpt.errors import InputError
from gpt.plain import Json

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

CHUNK_BYTES = 1 << 18
"""Size of a chunk of a file, which can be read without the chunks before it."""
LONGEST_VALUE = 64 << 20
"""The most bytes of a line of JSON, and the most characters of a value in an array, CSV or Parquet."""

_FORMATS = {".json": "json", ".jsonl": "json", ".ndjson": "json", ".csv": "csv", ".tsv": "csv"}
_FORMATS |= {".parquet": "parquet"}
_Opened: TypeAlias = io.BufferedReader | gzip.GzipFile | bz2.BZ2File | lzma.LZMAFile
_Decompress: TypeAlias = Callable[[str | io.BufferedReader, Literal["rb"]], _Opened]
_DECOMPRESSED: dict[str, _Decompress] = {".gz": gzip.open, ".bz2": bz2.BZ2File, ".xz": lzma.LZMAFile}
_LONGEST_LINE = 1 << 16  # bytes; a longer line of text is cut up
_ERRORS_OF_BYTES = (OSError, EOFError, MemoryError, UnicodeError, zlib.error, lzma.LZMAError)
_HEAD = 1 << 13  # bytes at the beginning that tell what a file is
_BLANKS = " \t\r\n"
_WESTERN = 0.2  # in Western European text at most this share of the bytes is beyond ASCII
_UNDEFINED = frozenset(b"\x81\x8d\x8f\x90\x9d")  # bytes without a meaning in Windows-1252
_SAMPLED = 4 << 20  # decompressed bytes from which the size of the whole file is estimated

_ARCHIVES = (".zip", ".tar", ".tgz", ".7z", ".rar")
_TAR = slice(257, 262), b"ustar"  # the place of a mark in a tar file, and the mark
_PERHAPS_BINARY = (".pt", ".o", ".a")  # endings of texts, too: their bytes decide
_BINARY = (  # endings of files without text
    *(".png", ".jpg", ".jpeg", ".gif", ".bmp", ".webp", ".ico", ".tif", ".tiff", ".heic", ".psd"),
    *(".mp3", ".wav", ".ogg", ".flac", ".m4a", ".mp4", ".mkv", ".avi", ".mov", ".webm"),
    *_ARCHIVES,
    *(".zst", ".jar", ".whl", ".deb", ".rpm", ".iso", ".dmg"),
    *(".pyc", ".pyo", ".pyd", ".class", ".so", ".dll", ".dylib", ".exe", ".wasm"),
    *(".pdf", ".docx", ".xlsx", ".pptx", ".odt", ".ods", ".epub", ".woff", ".woff2", ".ttf", ".otf"),
    *(".safetensors", ".pth", ".npy", ".npz", ".gguf", ".onnx", ".pkl", ".sqlite"),
)
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


class Row(NamedTuple):
    """A row and its place in the file."""

    number: int
    """The number of its line or row, counted from 1 at `position`."""
    value: Json
    """A dictionary of its columns, or the InputError that says why there is none."""
    position: int = 0
    """The byte of the file from which `number` counts."""


Choose = Callable[[Sequence[str]], Sequence[str]]
"""A function from the columns of a file to the columns that are read."""


def file_format(name: str) -> str:
    """Return `text`, or for rows `json`, `csv`, `parquet`, `hub` or `builtin`, by a name and its ending."""
    if name.startswith(("hub:", "builtin:")):
        return name.partition(":")[0]
    return _FORMATS.get(ending_of(name), "text")


def has_file_ending(name: str) -> bool:
    """Whether a name ends as those of files do, so that it is hardly a data set's on the hub."""
    ending = os.path.splitext(name.lower())[1]
    return ending in (".txt", ".md", ".yaml", *_FORMATS, *_DECOMPRESSED, *_BINARY, *_PERHAPS_BINARY)


def ending_of(name: str) -> str:
    """Return the ending that tells a file's format: the one before that of a compression, if there is one."""
    stem, ending = os.path.splitext(name.lower())
    return os.path.splitext(stem)[1] if ending in _DECOMPRESSED else ending


def endings_of(name: str) -> str:
    """Return the endings that tell a file's format and its compression, such as `.jsonl.gz`."""
    stem, ending = os.path.splitext(os.path.basename(name))
    return f"{os.path.splitext(stem)[1]}{ending}" if ending.lower() in _DECOMPRESSED else ending


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


class ReadError(InputError):
    """The error for a file, a URL or a data set that cannot be read. The message names it."""

    def __init__(self, name: str, cause: Exception) -> None:
        line = str(cause).strip().partition("\n")[0]
        super().__init__(f"cannot read {name} ({type(cause).__name__}: {line})")


@contextmanager
def errors_named(name: str) -> Iterator[None]:
    """Put the name of the file before the message of an InputError. Errors of reading become a ReadError."""
    try:
        yield
    except ReadError:
        raise
    except InputError as error:
        raise InputError(f"{name} {error}") from None
    except _errors_of_reading() as error:
        raise ReadError(name, error) from error


def _errors_of_reading() -> tuple[type[Exception], ...]:
    """Return the errors of reading a file. Arrow is imported only for them, as that takes long."""
    from pyarrow import ArrowException

    return (*_ERRORS_OF_BYTES, ArrowException)


@contextmanager
def network_errors_named(name: str) -> Iterator[None]:
    """Turn every error into a ReadError, around a library that reads from the network.

    The errors of `fsspec`, of `datasets` and of the packages that these use have no common class.
    """
    try:
        yield
    except Exception as error:
        raise ReadError(name, error) from error


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
        data = file.read(_HEAD)
    encoding = next((encoding for mark, encoding in _MARKS.items() if data.startswith(mark)), None)
    text = data.decode(encoding or "utf-8", "ignore").lstrip("\ufeff" + _BLANKS)
    return Head(encoding, b"\0" in data, text.startswith("["))


def is_binary(name: str) -> bool:
    """Whether a file holds no text: by its ending, or a NUL byte in its first 8 KB. False for Parquet."""
    if file_format(name) not in ("text", "json", "csv"):
        return False
    if os.path.splitext(name)[1].lower() in _BINARY:
        return True
    try:
        head = head_of(name)
    except _ERRORS_OF_BYTES:  # the error is reported when the file is read
        return False
    return head.has_nul and head.encoding is None


def binary_error(name: str) -> InputError:
    """Return the error for a binary file.

    It says so if the file is an archive, or seems to be UTF-16 without a byte order mark.
    """
    with _open(name) as file:
        data = file.read(_HEAD)
    place, mark = _TAR
    if ending_of(name) in _ARCHIVES or data[place] == mark:
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
        position = 0
        for number in count() if chunks is None else chunks:
            begin = number * CHUNK_BYTES
            end = (number + 1) * CHUNK_BYTES
            if chunks is not None and begin:
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
    near = data[max(0, place - _HEAD) : place + _HEAD]
    foreign = sum(byte > 0x7F for byte in near)
    western = foreign < _WESTERN * len(near) and not _UNDEFINED.intersection(near)
    encoding = "WINDOWS-1252" if western else "ENCODING"
    return (
        f"is not UTF-8 text: byte {position + place} cannot be decoded; {convert(name, encoding)} converts it"
    )


def convert(name: str, encoding: str) -> str:
    """Return the command that converts a file to UTF-8. A compressed one is decompressed first."""
    stem, ending = os.path.splitext(name)
    iconv = f"iconv -f {encoding} -t UTF-8"
    if ending.lower() not in _DECOMPRESSED:
        return f"{iconv} {shlex.quote(name)} > {shlex.quote(f'{stem}-utf8{ending}')}"
    program = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz"}[ending.lower()]
    stem, ending = os.path.splitext(stem)
    return f"{program} -dc {shlex.quote(name)} | {iconv} > {shlex.quote(f'{stem}-utf8{ending}')}"
