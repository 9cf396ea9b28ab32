"""The command line of `gpt fit` and `gpt validate`, and the files that it names with --config.

An option takes one value, and the last one counts: the defaults, the run that is resumed, a plan or a recipe,
the files in their order, the command line. Each gives texts, as they would stand on a command line; what an
option's text means is decided once, when all are put together.
"""

import json
import math
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from gpt.errors import InputError
from gpt.files import shipped
from gpt.plain import parse_yaml, shown
from gpt.run.help import meant
from gpt.run.options import OPTIONS, Options

Texts = dict[str, str]
_MEANT = {"fp16": "16-mixed", "16": "16-mixed", "bf16": "bf16-mixed", "fp32": "32-true", "32": "32-true"}
_WORDS: dict[Any, dict[str, bool | None]] = {bool: {"true": True, "false": False}, NoneType: {"null": None}}


@dataclass(frozen=True, kw_only=True)
class Given:
    """What a command line gives, its files included."""

    texts: Texts
    """The text of each option."""
    own: Texts
    """Of these, what stands on the command line itself."""
    recipe: bool
    """Whether a file was named."""
    print_config: bool


def scan(arguments: list[str], command: str) -> Given:
    """The options on a command line, a text or a checkpoint before them; an InputError for an unknown one."""
    words, files, own = list(arguments), Texts(), Texts()
    if words and not words[0].startswith("-"):
        own["data.corpus" if command == "fit" else "ckpt_path"] = words.pop(0)
    print_config, named = False, False
    while words:
        word = words.pop(0)
        if word == "--print_config":
            print_config = True
            continue
        if not word.startswith("--") and word != "-c":
            raise InputError(f"{shown(word)} is no option: expected --NAME VALUE")
        name, equals, text = word.removeprefix("--").partition("=")
        if name in ("config", "-c"):
            named = True
            files |= _read_config(text if equals else _value("config", words))
        else:
            check_name(name)
            own[name] = text if equals else _value(name, words)
    return Given(texts=files | own, own=own, recipe=named, print_config=print_config)


def check_name(name: str) -> None:
    """An InputError for an option that there is none of."""
    if name not in OPTIONS:
        raise InputError(f"there is no option --{name[:80]}{meant(name)} (see 'gpt fit --help')")


def as_texts(values: Mapping[Any, Any], prefix: str = "") -> Texts:
    """Nested values as texts by their dotted names."""
    found: Texts = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            found |= as_texts(value, f"{name}.")
        else:
            check_name(name)
            found[name] = value if isinstance(value, str) else json.dumps(value)
    return found


def from_texts(texts: Texts, kind: type = Options, prefix: str = "") -> Any:
    """`Options`, the rest at their defaults; an InputError for a value that is not of its type."""
    hints, found = get_type_hints(kind), {}
    for field in fields(kind):
        name, hint = f"{prefix}{field.name}", hints[field.name]
        if is_dataclass(hint):
            found[field.name] = from_texts(texts, hint, f"{name}.")  # type: ignore[arg-type]
        elif name in texts:
            found[field.name] = _typed(name, hint, texts[name])
    return kind(**found)


def described(kind: Any) -> str:
    """A type in words."""
    if get_origin(kind) is Literal:
        return ", ".join(map(str, get_args(kind)))
    if get_origin(kind) is tuple:
        return f"[{', '.join('NUMBER' for _ in get_args(kind))}]"
    if parts := get_args(kind):
        return " or ".join(described(part) for part in parts)
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", NoneType: "null"}
    return names[kind]


def recipe_file(name: str) -> str:
    """The text of a recipe that comes with the package."""
    return (shipped("configs") / f"{name}.yaml").read_text(encoding="utf-8")


def _typed(name: str, kind: Any, text: str) -> Any:
    try:
        return value_of(kind, text)
    except (ValueError, TypeError):
        better = _MEANT.get(text, "")
        hint = f"; did you mean {better}?" if better and better in described(kind) else ""
        raise InputError(f"--{name} {shown(text)}: expected {described(kind)}{hint}") from None


def value_of(kind: Any, text: str) -> Any:
    """The value of a text; a ValueError or a TypeError for one that is not of this type."""
    parts = get_args(kind)
    if get_origin(kind) is Literal:
        if text in parts:
            return text
    elif get_origin(kind) is tuple:
        values = zip(parts, json.loads(text), strict=True)
        return tuple(value_of(part, str(value)) for part, value in values)
    elif parts:
        for part in reversed(parts):  # null before text
            with suppress(ValueError, TypeError):
                return value_of(part, text)
    elif kind is str:
        return text
    elif kind in (int, float):
        if math.isfinite(number := kind(text)):
            return number
    elif text.lower() in _WORDS[kind]:
        return _WORDS[kind][text.lower()]
    raise ValueError


def _value(name: str, words: list[str]) -> str:
    """The next word; a switch may stand alone."""
    if name in OPTIONS and OPTIONS[name].kind is bool and (not words or words[0].startswith("--")):
        return "true"
    if not words:
        raise InputError(f"--{name} needs a value")
    return words.pop(0)


def _read_config(argument: str) -> Texts:
    """The options in a file, a recipe of the package, or a text of YAML."""
    recipes = {file.stem: str(file) for file in shipped("configs").glob("*.yaml")}
    path = argument if os.path.isfile(argument) else recipes.get(argument)
    if path is None and re.fullmatch(r"[\w./\\-]+", argument):  # no YAML of options
        raise InputError(f"--config {argument}: no such file, nor one of {', '.join(sorted(recipes))}")
    try:
        values = parse_yaml(Path(path).read_text(encoding="utf-8") if path else argument)
    except ValueError as error:
        raise InputError(f"--config {path or ''} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise InputError(
            f"--config {shown(path or argument)}: expected options such as 'trainer: {{max_steps: 9}}'"
        )
    return as_texts(values)
