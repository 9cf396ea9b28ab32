"""What a run prints, and what happens when nobody reads it any more."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from lightning.pytorch.utilities import rank_zero_only


@rank_zero_only
def report(*lines: str, prefix: str = "gpt fit: ") -> None:
    """Print lines on stderr, on the first process alone."""
    for line in lines:
        print(f"{prefix}{line}", file=sys.stderr)


@contextmanager
def output_may_end() -> Iterator[None]:
    """Continue silently when stdout or stderr cannot be written: `| head -1` ended, or a terminal closed."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _MayEnd(before[0]), _MayEnd(before[1])
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = before


class _MayEnd:
    """A stream whose file becomes the null device when writing fails."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._try(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, call: Callable[..., object], *args: str) -> None:
        try:
            call(*args)
        except OSError:
            descriptor = os.open(os.devnull, os.O_WRONLY)
            os.dup2(descriptor, self._stream.fileno())
            os.close(descriptor)
