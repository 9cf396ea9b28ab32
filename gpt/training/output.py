"""What happens to a run's output when nobody reads it any more."""

import os
from typing import Any, TextIO


class MayEnd:
    """Discards output once its reader is gone: `| head -1` has ended, a terminal has closed."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write and flush, so that a failure is noticed here."""
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:
            with open(os.devnull, "wb") as nothing:
                os.dup2(nothing.fileno(), self._stream.fileno())
        return len(text)
