"""Read the text of a file in chunks, so that memory does not grow with the file.

The messages of InputErrors follow the file's name, which `errors_named` puts before them.
"""

from collections.abc import Iterable, Iterator
from itertools import count
from typing import NamedTuple

from gpt.data.encoding import CHUNK_BYTES, HEAD_BYTES, ByteFile, convert, opened
from gpt.errors import InputError

_LONGEST_LINE = 1 << 16  # bytes; a longer line of text is cut up
_WESTERN = 0.2  # in Western European text at most this share of the bytes is beyond ASCII
_UNDEFINED = frozenset(b"\x81\x8d\x8f\x90\x9d")  # bytes without a meaning in Windows-1252


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
    near = data[max(0, place - HEAD_BYTES) : place + HEAD_BYTES]
    foreign = sum(byte > 0x7F for byte in near)
    western = foreign < _WESTERN * len(near) and not _UNDEFINED.intersection(near)
    encoding = "WINDOWS-1252" if western else "ENCODING"
    return (
        f"is not UTF-8 text: byte {position + place} cannot be decoded; {convert(name, encoding)} converts it"
    )
