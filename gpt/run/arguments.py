"""The command line of `gpt fit` and `gpt validate`, and the files that it names with --config.

An option takes one value, and the last one counts: the defaults, the run that is resumed, a plan or a recipe,
the files in their order, the command line. Files are read as the texts that would stand on a command line.
"""

import argparse
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from gpt.errors import InputError
from gpt.files import shipped
from gpt.plain import parse_yaml, seconds_of, shown
from gpt.run.mistakes import VALUES, meant
from gpt.run.options import OPTIONS, flat

Texts = dict[str, str]
_MOST_MINUTES = 1_000_000


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
    words, files, own = list(arguments), dict[str, str](), dict[str, str]()
    if words and not words[0].startswith("-"):
        own["data.corpus" if command == "fit" else "ckpt_path"] = words.pop(0)
    print_config, named = False, False
    while words:
        word = words.pop(0)
        name, equals, text = word.removeprefix("--").partition("=")
        name = {"-c": "config"}.get(name, name)
        if word == "--print_config":
            print_config = True
            continue
        if not word.startswith("--") and name != "config":
            raise InputError(f"{shown(word)} is no option: expected --NAME VALUE")
        if name != "config":
            check_name(name)
        if not equals:
            text = _value(name, words)
        if name == "config":
            named = True
            files |= _read_config(text)
        else:
            own[name] = text
    texts = files | own
    if "minutes" in texts and texts["minutes"] != "null":
        minutes = seconds_of("minutes", texts["minutes"]) / 60
        if not 0 <= minutes <= _MOST_MINUTES:
            raise InputError(f"--minutes {texts['minutes']}: expected a time, such as 90s, 10m or 8h")
        texts["minutes"] = str(minutes)
    return Given(texts=texts, own=own, recipe=named, print_config=print_config)


def check_name(name: str) -> None:
    """An InputError for an option that there is none of."""
    if name not in OPTIONS:
        raise InputError(f"there is no option --{name[:80]}{meant(name, OPTIONS)} (see 'gpt fit --help')")


def as_texts(values: Mapping[Any, Any]) -> Texts:
    """Options by their dotted names, as they would stand on a command line."""
    found: Texts = {}
    for name, value in flat(values):
        check_name(name)
        found[name] = value if isinstance(value, str) else json.dumps(value)
    return found


def typed(texts: Texts) -> dict[str, Any]:
    """The options' values; an InputError for one that is not of its type."""
    from jsonargparse import ArgumentError, ArgumentParser

    parser = ArgumentParser(exit_on_error=False, allow_abbrev=False)
    for name in texts:
        parser.add_argument(f"--{name}", type=OPTIONS[name].kind)
    values: dict[str, Any] = {}
    for name, text in texts.items():  # one by one: an error names its option
        try:
            value = parser.parse_args([f"--{name}={text}"], defaults=False)[name]
        except (ArgumentError, argparse.ArgumentError, ValueError):
            value = parser  # what no option can be
        if value is parser or (isinstance(value, float) and value != value):
            better = VALUES.get(name, {}).get(text)
            hint = f"; did you mean {better}?" if better else ""
            raise InputError(f"--{name} {shown(text)}: expected {described(OPTIONS[name].kind)}{hint}")
        values[name] = value
    return values


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
