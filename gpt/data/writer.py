"""Writes a prepared folder: in another folder beside it, which takes its place when it is complete."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from gpt.data.documents import Piece
from gpt.data.shards import FILES, INDEX_DTYPE, META, Counts
from gpt.errors import InputError

_OURS = (*FILES, META)  # the last is deleted last: without it the others are nobody's


class SplitWriter:
    """Writes the documents of a split; `<|endoftext|>` follows each, and each reply of an example."""

    def __init__(self, tokens: IO[bytes], starts: IO[bytes], dtype: np.dtype[Any], eot: int) -> None:
        self._tokens, self._starts = tokens, starts
        self._dtype, self._eot = dtype, np.array([eot])
        self._begun = False  # the document has a token
        self._open = False  # `<|endoftext|>` has to follow what was written last
        self.counts = Counts()
        self.empty = 0  # documents without a token, which are left out

    def add(self, piece: Piece, ids: NDArray[Any]) -> None:
        """Append the ids of a piece; those of a prompt are stored as -1 - id."""
        if piece.first or not piece.scored:
            self.end()
        if piece.first:
            self._begun = False
            self.empty += 1
        if len(ids) and not self._begun:
            self._begun = True
            self.empty -= 1
            self.counts.documents += 1
            self._starts.write(np.array(self.counts.tokens, INDEX_DTYPE).tobytes())
        self._write(ids if piece.scored else ~ids.astype(np.int64))
        self._open = piece.scored and self._begun
        self.counts.bytes += len(piece.text.encode())

    def end(self) -> None:
        """Write the `<|endoftext|>` of what was written last."""
        if self._open:
            self._write(self._eot)
            self._open = False

    def _write(self, ids: NDArray[Any]) -> None:
        self._tokens.write(ids.astype(self._dtype).tobytes())
        self.counts.tokens += len(ids)


def check_ours(folder: Path) -> None:
    """An InputError for a folder with files that are not those of prepared text."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    if others := [name for name in names if META not in names or name not in _OURS]:
        raise InputError(f"{folder} holds other files ({min(others)}): choose an empty folder to prepare in")


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """A folder to write in, which takes the place of `folder` when the block succeeds; else it is deleted.

    What was prepared in `folder` is deleted, nothing else. A full disk is an InputError.
    """
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed
        unfinished.mkdir(parents=True)
        yield unfinished
        if folder.is_dir():
            for name in _OURS:
                (folder / name).unlink(missing_ok=True)
            folder.rmdir()
        os.rename(unfinished, folder)
    except OSError as error:  # what reading raises is an InputError
        raise InputError(f"cannot write {folder}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
