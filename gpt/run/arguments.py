"""The command line of `gpt fit` and `gpt validate`, and the files that it names with --config.

A later source overrides an earlier one: the defaults, the run that is resumed, a plan or a recipe, the files
in their order, the command line. The option's type decides how a text is read, in a file as on the command
line: a name or a path is taken as it is typed, and only `null` means None. The docstrings of the options'
fields are their help, see `gpt.run.options`.
"""

import os
import re
from argparse import SUPPRESS
from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeVar

from jsonargparse import ArgumentError, ArgumentParser

from gpt.command_line import check_not_null, check_option, check_options, with_first
from gpt.errors import InputError, did_you_mean
from gpt.files import shipped
from gpt.help import HelpFormatter, value_name
from gpt.plain import Json, JsonObject, parse_yaml
from gpt.run.options import OPTIONS, Options

T = TypeVar("T")
Values = JsonObject  # option values by dotted name, such as "data.batch_size"

_FIT = """Train a model on a text: a file, a folder, a pattern or a data set of the hub.
With --minutes, the text and the time decide model and training. With --trainer.max_steps or another limit,
the options below do. Without either, the run takes two minutes. Rare options: docs/options.md."""
_VALIDATE = """Print loss and bits per byte of a run's newest checkpoint on the text that the run held out.
The run decides all options that are not given."""


@dataclass(frozen=True)
class Given:
    """The options that a start was given.

    None stands for null, which only an option whose type allows it can be given. In `all` it overrides files
    like any other value; it asks for nothing, so `asked` leaves it out.
    """

    own: Values
    """Those of the command line, with `config` and `print_config`."""
    files: Values
    """Those of the files that --config names."""

    @property
    def all(self) -> Values:
        """All of them; the command line's override those of files."""
        return {**self.files, **self.own}

    @property
    def asked(self) -> Values:
        """Those that are not null."""
        return {name: value for name, value in self.all.items() if value is not None}


class _Command(NamedTuple):
    """The options and the help of a command."""

    first: str
    """The option whose value may come first without its name."""
    first_shown: str
    purpose: str
    example: str
    options: Collection[str]
    """The options that the help lists, if they are not rare: the others change nothing in this command."""


_COMMANDS = {
    "fit": _Command(
        first="data.corpus",
        first_shown="[TEXT]",
        purpose=_FIT,
        example="my.txt --minutes 10 --run mine",
        options=OPTIONS.keys() - {"ckpt_path"},
    ),
    "validate": _Command(
        first="ckpt_path",
        first_shown="RUN",
        purpose=_VALIDATE,
        example="runs/mine",
        options=(
            "ckpt_path",
            "data.corpus",
            "data.batch_size",
            "data.val_fraction",
            "data.most_bytes",
            "trainer.accelerator",
            "trainer.precision",
            "trainer.devices",
        ),
    ),
}
_GROUPS = {  # the headings of the help, and how the names of their options begin
    "run": "",
    "text": "data.",
    "training": "trainer.",
    "model": "model.",
    "optimizer": "model.optimizer.",
}


def scan(arguments: list[str], command: str) -> Given:
    """Return the options of a command line and of its files.

    Raises InputError for an unknown option or a value of the wrong type.
    """
    arguments = with_first(arguments, _COMMANDS[command].first)
    for word in arguments:
        name = word.lstrip("-").partition("=")[0]
        if _is_option(word) and name not in (*OPTIONS, "config", "print_config", "help"):
            raise _unknown(name)
    parser = _parser(command)
    try:
        own = vars(parser.parse_args(arguments, defaults=False).as_flat())
    except ArgumentError:
        kinds = {name: option.kind for name, option in OPTIONS.items()}
        check_options(_parser("fit"), arguments, kinds)
        raise  # an option has no value, or a value has no option
    files = Values()
    for config in own.get("config", []):
        files |= typed(_read_config(config))
    return Given(own, files)


def typed(values: Values) -> Values:
    """Flatten a file's nested values to dotted names; InputError for a value of the wrong type."""
    flat = dict(_flat(values))
    for name, value in flat.items():
        if name not in OPTIONS:
            raise _unknown(name)
        if value is None:
            check_not_null(name, OPTIONS[name].kind)
    try:
        return vars(_parser("fit").parse_object(values, defaults=False).as_flat())
    except ArgumentError:
        for name, value in flat.items():
            check_option(_parser("fit"), name, value, OPTIONS[name].kind)
        raise


def known(values: Values, prefix: str = "") -> tuple[Values, list[str]]:
    """Return the nested values without unknown options, and the dotted names of the unknown ones."""
    kept: Values = {}
    unknown: list[str] = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        if name in OPTIONS:
            kept[key] = value
        elif not any(option.startswith(f"{name}.") for option in OPTIONS):
            unknown.append(name)
        elif isinstance(value, dict):
            kept[key], others = known(value, f"{name}.")
            unknown += others
        else:  # a plain value where a group of options belongs: `typed` reports it
            kept[key] = value
    return kept, unknown


def options_of(values: Values) -> Options:
    """Build the options of a run from these values, with defaults for the others."""
    return built(Options, values)


def built(kind: type[T], values: Values, prefix: str = "") -> T:
    """Build a group of options, whose names begin with the prefix, with defaults for those not given."""
    given = {}
    for field in fields(kind):  # type: ignore[arg-type]
        name = f"{prefix}{field.name}"
        if is_dataclass(field.default):
            given[field.name] = built(type(field.default), values, f"{name}.")
        elif name in values:
            given[field.name] = values[name]
    return kind(**given)


def recipe(name: str) -> Values:
    """Return the options of a recipe that comes with the package."""
    return typed(_shipped(name))


def _shipped(name: str) -> Json:
    return parse_yaml((shipped("configs") / f"{name}.yaml").read_text(encoding="utf-8"))


def _is_option(word: str) -> bool:
    """Whether argparse takes a word of the command line as an option's long name, known or not."""
    if not word.startswith("-") or word[:2] in ("-c", "-h") or " " in word or word in ("-", "--"):
        return False
    try:
        float(word)
    except ValueError:
        return True
    return False  # a negative number is a value


def _flat(values: Values, prefix: str = "") -> Iterator[tuple[str, Json]]:
    """Yield the dotted names in nested mappings, and their values."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        is_group = any(option.startswith(f"{name}.") for option in OPTIONS)
        if is_group and isinstance(value, dict):
            yield from _flat(value, f"{name}.")
        else:
            yield name, value


@cache
def _parser(command: str) -> ArgumentParser:
    about = _COMMANDS[command]
    parser = ArgumentParser(
        usage=f"gpt {command} {about.first_shown} [--NAME VALUE]...",
        description=about.purpose,
        epilog=f"example: gpt {command} {about.example}",
        formatter_class=HelpFormatter,
        parser_mode="json",  # for values: YAML's aliases can expand without bound
        print_config=None,  # jsonargparse's own would leave out the values from files and checkpoints
        allow_abbrev=False,
        exit_on_error=False,
    )
    configs = "options from a file, or from a recipe of configs/; several override one another"
    parser.add_argument("-c", "--config", action="append", metavar="NAME|FILE", help=configs)
    printing = "print all options as a file for --config, and do nothing else"
    parser.add_argument("--print_config", action="store_true", help=printing)
    groups = {prefix: parser.add_argument_group(title) for title, prefix in _GROUPS.items()}
    for name, option in OPTIONS.items():
        is_hidden = " Rare." in option.text or name not in about.options
        is_flag = option.kind is bool  # given without a value, it is true
        prefix = max((prefix for prefix in groups if name.startswith(prefix)), key=len)
        groups[prefix].add_argument(
            f"--{name}",
            type=option.kind,
            default=option.default if command == "fit" else None,
            metavar=value_name(name, option.kind),
            help=SUPPRESS if is_hidden else option.text.split(". ")[0],
            nargs="?" if is_flag else None,
            const=True if is_flag else None,
        )
    if command == "fit":
        quick = parser.parse_object(_shipped("quick"), defaults=False)
        parser.set_defaults(vars(quick.as_flat()))
    return parser


def _unknown(name: str) -> InputError:
    """Return the error for an unknown option; it suggests the most similar known one."""
    options = _options_by_name()
    typed = _last(name) if _last(name) in options else name  # only the group may be wrong
    meant = did_you_mean(
        typed, options, shown=lambda near: " or ".join(f"--{option}" for option in options[near])
    )
    return InputError(f"there is no option --{name[:80]}{meant} (see 'gpt fit --help')")


def _options_by_name() -> dict[str, list[str]]:
    """Return the options by the names that a user may know: their own, the last parts, other programs'."""
    options: dict[str, list[str]] = {}
    for name, option in OPTIONS.items():
        elsewhere = re.findall(r"\w+", option.text.partition(" Elsewhere: ")[2])
        for known in {name, _last(name), *elsewhere}:
            options.setdefault(known, []).append(name)
    return options


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _read_config(argument: str) -> Values:
    """Read the options in a file, or in a recipe of the package."""
    recipes = {file.stem: file for file in shipped("configs").glob("*.yaml")}
    path = Path(argument) if os.path.isfile(argument) else recipes.get(argument)
    if path is None:
        meant = did_you_mean(argument, recipes) or f", nor one of {', '.join(sorted(recipes))}"
        raise InputError(f"--config {argument}: no such file{meant}")
    try:
        return dict(parse_yaml(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        what = "expected options such as 'trainer: {max_steps: 9}'"
        raise InputError(f"--config {argument}: {what}: {error}") from None
