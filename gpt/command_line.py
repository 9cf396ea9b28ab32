"""Read the words of a command line, and say of a wrong value of an option what was expected."""

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from itertools import pairwise
from types import NoneType
from typing import TYPE_CHECKING, get_args

from gpt.errors import InputError
from gpt.plain import shown

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser


def with_first(arguments: list[str], option: str) -> list[str]:
    """Return a command line in which the value before all options has its option's name in front."""
    is_named = not arguments or arguments[0].startswith("-")
    return arguments if is_named else [f"--{option}", *arguments]


def values_in(arguments: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Yield each option's name and value; the value is None if none follows."""
    for word, following in pairwise([*arguments, "--"]):
        name, equals, value = word.removeprefix("--").partition("=")
        if word.startswith("--") and equals:
            yield name, value
        elif word.startswith("--"):
            yield name, None if following.startswith("--") else following


def kind_in_words(kind: object) -> str:
    """Return an option's type as text, such as `int` or `one of 'cpu', 'cuda'`."""
    if is_dataclass(kind):
        return "a mapping"
    return re.sub(r"(Optional\[)?Literal\[(.+?)\]+", r"one of \2", inspect.formatannotation(kind))


def check_not_null(name: str, kind: object, expected: str = "") -> None:
    """Raise InputError for an option of a file that is null, unless its type allows it.

    jsonargparse takes null for any type. `expected` describes the type, if it is not to be told by its name.
    """
    if NoneType not in get_args(kind):
        raise InputError(f"--{name}: expected {expected or kind_in_words(kind)}, got null")


def check_option(parser: "ArgumentParser", name: str, value: object, kind: object) -> None:
    """Raise InputError if an option, of a dotted name and this type, cannot have this value."""
    from jsonargparse import ArgumentError

    nested = value
    for part in reversed(name.split(".")):
        nested = {part: nested}
    try:
        parser.parse_object(nested, defaults=False)
    except ArgumentError:
        raise InputError(f"--{name}: expected {kind_in_words(kind)}, got {shown(value)}") from None


def check_options(parser: "ArgumentParser", arguments: list[str], kinds: Mapping[str, object]) -> None:
    """Raise InputError for the first option in a command line whose value is not of its type."""
    for name, value in values_in(arguments):
        if name in kinds and value is not None:
            check_option(parser, name, value, kinds[name])
