"""Format the help of a command: the same way for all commands, and in every terminal."""

import textwrap
from argparse import SUPPRESS, Action, RawDescriptionHelpFormatter
from argparse import HelpFormatter as BaseFormatter
from types import NoneType
from typing import Literal, get_args, get_origin

from jsonargparse import DefaultHelpFormatter

_WIDTH = 100
_NUMBERS: dict[object, str] = {int: "N", float: "NUMBER"}
_PRINT_CONFIG = "--print_config"
_TEXTS = {  # of the options that jsonargparse adds by itself
    _PRINT_CONFIG: "print all options as a file for --config, and do nothing else",
    "--template": "a YAML file with the three texts below",
}


class _Layout(BaseFormatter):
    """The layout of all helps: each option on its own line, and below it the meaning and the default."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=8, width=_WIDTH)

    def _get_help_string(self, action: Action) -> str:
        for option in action.option_strings:
            if option in _TEXTS:
                return _TEXTS[option]
        text = _small_initial((action.help or "").removesuffix(" Rare.").rstrip("."))
        default = action.default
        if not action.option_strings or default is None or default is False or default in ("", SUPPRESS):
            return text
        shown = str(default).lower() if isinstance(default, bool) else str(default).replace("\n", r"\n")
        return f"{text} (default: {shown})"

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _format_action_invocation(self, action: Action) -> str:
        if _PRINT_CONFIG in action.option_strings:  # without jsonargparse's placeholder
            return _PRINT_CONFIG
        return super()._format_action_invocation(action)


class HelpFormatter(_Layout, DefaultHelpFormatter):
    """The help of a parser of jsonargparse."""


class PlainHelpFormatter(_Layout, RawDescriptionHelpFormatter):
    """The help of a parser of argparse, with the description's own lines."""


def _small_initial(text: str) -> str:
    """Return the text with a small first letter, unless its first word is a name such as `AdamW`."""
    first = text.split(" ", 1)[0]
    return text[:1].lower() + text[1:] if first[1:].islower() or len(first) == 1 else text


def value_name(option: str, kind: object) -> str:
    """Return the placeholder for the value of an option of this type: its choices, a number, or its name."""
    if get_origin(kind) is Literal:
        return f"{{{','.join(get_args(kind))}}}"
    if kind is bool:
        return "{true,false}"
    parts = [part for part in get_args(kind) if part is not NoneType]
    if parts:  # of `int | None`
        return value_name(option, parts[0])
    return _NUMBERS.get(kind, option.rpartition(".")[2].upper())
