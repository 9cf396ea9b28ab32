"""Read plain data that a stranger may have written: JSON, YAML, names, times, and dataclasses of these."""

import json
import math
import re
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from datetime import timedelta
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

from gpt.errors import InputError

if TYPE_CHECKING:
    import yaml
    from _typeshed import DataclassInstance

T = TypeVar("T")
Json: TypeAlias = Any
"""A value as JSON and YAML have it: None, a bool, a number, a text, or lists and mappings of these.

For mypy it is `Any`. So code that reads a stranger's file has to check the types, or to catch what a value
of another type raises.
"""
JsonObject: TypeAlias = dict[str, Json]
"""A mapping of names to such values."""
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
LARGEST = 1 << 53  # up to here every JSON reader has exact whole numbers


def shown(value: object) -> str:
    """Return a value as text for an error's line; it is short however large or deep the value is."""
    return reprlib.repr(value)


def parse_json(text: str) -> Json:
    """Parse a JSON text whose numbers are finite; ValueError for any other text."""
    try:
        return json.loads(text, parse_float=_finite, parse_constant=_finite)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_yaml(text: str) -> Json:
    """Parse a YAML text of plain values; ValueError for any other, and for aliases, which can expand."""
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: "yaml.Node | None", index: int) -> "yaml.Node | None":
            if self.check_event(yaml.AliasEvent):
                raise yaml.YAMLError("it has an alias (*), write out what it stands for")
            return super().compose_node(parent, index)

    try:
        return yaml.load(text, Loader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from None


def is_hub_name(name: str) -> bool:
    """Whether a name is an OWNER/NAME of the Hugging Face hub; never if a folder OWNER exists here."""
    return bool(re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name)) and not Path(name).parent.is_dir()


def build(kind: type[T], values: object) -> T:
    """Build the dataclass `kind` from a mapping; InputError unless it has exactly its fields and types."""
    hints = get_type_hints(kind)
    if not isinstance(values, Mapping) or values.keys() != hints.keys():
        raise InputError(f"expected {', '.join(hints)}, got {shown(values)}")
    for name, hint in hints.items():
        if not _is_a(values[name], hint):
            raise InputError(f"{name} is {shown(values[name])}, expected {_hint_in_words(hint)}")
    return kind(**values)


def _hint_in_words(hint: object) -> str:
    """Return the type of a field as text, with the parts that it has, and that numbers are finite."""
    name = hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)
    return f"{name} of finite numbers" if "float" in name else name


def build_known(kind: type[T], values: object) -> tuple[T, tuple[str, ...]]:
    """Like `build`, from a mapping that another version has written; also return the unknown fields' names.

    Unknown fields are ignored. Missing fields take their defaults; InputError for one without a default.
    """
    if not isinstance(values, Mapping):
        raise InputError(f"expected {', '.join(get_type_hints(kind))}, got {shown(values)}")
    given = {str(name): value for name, value in values.items()}
    known: JsonObject = {}
    for field in fields(kind):  # type: ignore[arg-type]
        if field.name in given:
            known[field.name] = given[field.name]
        elif field.default is not MISSING:
            known[field.name] = field.default
        elif field.default_factory is not MISSING:
            known[field.name] = field.default_factory()
    return build(kind, known), tuple(sorted(given.keys() - known.keys()))


def as_dict(value: "DataclassInstance") -> JsonObject:
    """Return a dataclass's fields and values, without copying the values."""
    return {field.name: getattr(value, field.name) for field in fields(value)}


def seconds_of(name: str, text: str) -> float:
    """Return the seconds in 90s, 10m, 8h, DD:HH:MM:SS or a plain number of minutes; else InputError."""
    try:
        if ":" in text:
            days, hours, minutes, seconds = map(int, text.split(":"))
            return timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds).total_seconds()
        number, unit = (text[:-1], text[-1]) if text[-1:] in _UNITS else (text, "m")
        return timedelta(seconds=float(number) * _UNITS[unit]).total_seconds()  # raises if not finite
    except (ValueError, OverflowError):
        raise InputError(f"--{name} {shown(text)}: expected a time, such as 90s, 10m or 8h") from None


def plain_name(option: str, name: str) -> str:
    """Return a name that one folder can have; InputError, which names the option, for any other."""
    if not name or name.startswith(".") or Path(name).name != name:
        raise InputError(f"expected a plain folder name for --{option}, got {shown(name)}")
    return name


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a finite number")
    return number


def _is_a(value: object, hint: object) -> bool:
    """Whether a value has the type that a dataclass's field declares, its parts too."""
    if isinstance(hint, UnionType):
        return any(_is_a(value, kind) for kind in get_args(hint))
    if hint is NoneType:
        return value is None
    if hint is int:
        return _is_number(value, (int,))
    if hint is float:
        return _is_number(value, (int, float))
    kind = get_origin(hint) or hint  # dict of dict[str, int]
    if not isinstance(kind, type) or not isinstance(value, kind):
        return False
    inner = [part for part in get_args(hint) if part is not ...]  # [str] of tuple[str, ...]
    if not inner or inner[-1] is Any:  # as in `JsonObject`
        return True
    parts = value.values() if isinstance(value, Mapping) else value
    assert isinstance(parts, Iterable)
    return all(_is_a(part, inner[-1]) for part in parts)


def _is_number(value: object, kinds: tuple[type[float], ...]) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool) and abs(value) <= LARGEST
