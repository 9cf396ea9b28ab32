"""What a run prints, and what happens when nobody reads it any more."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from lightning.pytorch.utilities import rank_zero_only


@rank_zero_only
def report(*lines: str) -> None:
    """Print lines on stderr, on the first process alone."""
    for line in lines:
        print(f"gpt fit: {line}", file=sys.stderr)


@rank_zero_only
def announce(line: str) -> None:
    """Print a line about a run's progress on stderr, on the first process alone."""
    print(line, file=sys.stderr)


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
        try:
            return self._stream.write(text)
        except OSError:
            self._to_null_device()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._to_null_device()

    def _to_null_device(self) -> None:
        descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(descriptor, self._stream.fileno())
        os.close(descriptor)
