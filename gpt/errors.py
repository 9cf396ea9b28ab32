"""The error for invalid user input, and what its line may say to do."""

import difflib
from collections.abc import Callable, Iterable


class InputError(ValueError):
    """An error of the given input. The command line prints its one line and exits with its status."""

    status = 2


class DivergedError(InputError):
    """The end of a run whose loss or gradients are not finite. Its status tells `gpt compare` so."""

    status = 3


def check_least(least: float, **values: float | None) -> None:
    """Raise an InputError that names a value below `least`; None stands for an option that is not set."""
    for name, value in values.items():
        if value is not None and not value >= least:
            raise InputError(f"{name} must be at least {least}, got {value}")


def missing_extra(what: str, extra: str) -> InputError:
    """Return the error for something that needs the packages of an extra. An environment of uv has no pip."""
    install = f"python3 scripts/install.py .venv --extras {extra}, or pip install -e '.[{extra}]'"
    return InputError(f"{what} needs more packages: {install}")


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
