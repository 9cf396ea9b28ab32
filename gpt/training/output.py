"""What a run prints, and what happens when nobody reads it any more."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
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
    out: Any = _MayEnd(sys.stdout)
    err: Any = _MayEnd(sys.stderr)
    with redirect_stdout(out), redirect_stderr(err):
        try:
            yield
        finally:
            out.flush()
            err.flush()


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
            with open(os.devnull, "wb") as nothing:
                os.dup2(nothing.fileno(), self._stream.fileno())
