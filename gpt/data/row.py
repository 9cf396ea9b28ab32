"""A row of a file of rows, and the choice of its columns."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from gpt.errors import InputError
from gpt.plain import Json

LONGEST_VALUE = 64 << 20
"""The most bytes of a line of JSON, and the most characters of a value in an array, CSV or Parquet."""


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


def check_named_once(chosen: Sequence[str], present: Sequence[str]) -> None:
    """Raise InputError for a chosen column whose name two of the file's columns have."""
    if twice := [name for name in chosen if present.count(name) > 1]:
        raise InputError(f"has two columns {twice[0]!r}: rename one")
