"""The error for invalid user input, and the suggestion that its line may end with."""

import difflib
from collections.abc import Callable, Iterable


class InputError(ValueError):
    """An error of the given input. The command line prints its one line and exits with status 2."""


def check_least(least: float, **values: float | None) -> None:
    """Raise an InputError that names a value below `least`; None stands for an option that is not set."""
    for name, value in values.items():
        if value is not None and not value >= least:
            raise InputError(f"{name} must be at least {least}, got {value}")


def did_you_mean(
    typed: str,
    known: Iterable[str],
    *,
    before: str = "; ",
    shown: Callable[[str], str] = str,
    likeness: float = 0.6,
) -> str:
    """Return `; did you mean X?` for the known name that is the most like the typed one; "" if none is.

    Args:
        typed: what the user has given.
        known: the names that exist.
        before: what stands before the question.
        shown: turns the known name into X.
        likeness: the least ratio of `difflib.SequenceMatcher`, which is 1 for equal names.
    """
    near = difflib.get_close_matches(typed, known, 1, likeness)
    return f"{before}did you mean {shown(near[0])}?" if near else ""
