"""The errors of reading a file, a URL or a data set; their message names it."""

import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

from gpt.errors import InputError

ERRORS_OF_BYTES = (OSError, EOFError, MemoryError, UnicodeError, zlib.error, lzma.LZMAError)
"""The errors of reading a file's bytes, decompressed and as text."""


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

    return (*ERRORS_OF_BYTES, ArrowException)


@contextmanager
def network_errors_named(name: str) -> Iterator[None]:
    """Turn every error into a ReadError, around a library that reads from the network.

    The errors of `fsspec`, of `datasets` and of the packages that these use have no common class.
    """
    try:
        yield
    except Exception as error:
        raise ReadError(name, error) from error
