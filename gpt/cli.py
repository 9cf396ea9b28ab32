"""The `gpt` command: a thin dispatcher that imports a command's code only when it is called."""

import argparse
import inspect
import io
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from itertools import pairwise, takewhile
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NamedTuple, get_args, get_type_hints

from gpt.command_line import check_not_null, check_options, kind_in_words, values_in, with_first
from gpt.cores import limit_threads
from gpt.errors import InputError, did_you_mean
from gpt.home import ensure_home
from gpt.imports import importing
from gpt.plain import parse_yaml

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser


class Command(NamedTuple):
    """What a command runs.

    The typed parameters of its function are the options, and the docstring is their help. A command without
    an example parses its own arguments, and has examples where it does.
    """

    code: str
    """MODULE:FUNCTION within this package."""
    purpose: str
    example: str = ""
    """Its arguments."""


COMMANDS = {
    "fit": Command("run.command:main", "train a model, for two minutes by default"),
    "plan": Command("plan.command:plan", "show what fit --minutes would train"),
    "generate": Command(
        "generation.write:write", "write text with a trained model", "runs/mine --prompt 'Once'"
    ),
    "runs": Command("run.listing:runs", "list the runs here, the newest first", "other/runs"),
    "plot": Command("pictures.runs:plot", "draw the losses of runs in one picture", "runs/quick runs/mine"),
    "compare": Command("compare.command:main", "compare variants over several seeds"),
    "evaluate": Command("evaluation.evaluate:evaluate", "score a model on a text", "runs/mine --data my.txt"),
    "validate": Command("run.command:main", "score a run on its own held-out text"),
    "attention": Command(
        "pictures.attention:attention_maps", "draw what each head looks at", "runs/mine --text 'To be'"
    ),
    "serve": Command("serve.start:serve", "serve a model over HTTP, with a page", "runs/mine"),
    "export": Command(
        "share.export:export_weights",
        "write a model for another program or a browser",
        "runs/mine --format html --output mine.html",
    ),
    "import": Command("weights.commands:import_weights", "read GPT-2 weights of another program", "gpt2"),
    "prepare": Command("data.prepare:prepare", "turn a corpus into token files", "my.txt --output my-tokens"),
}
WITH_TEXT = ("fit", "plan")  # take a text as their first argument, or by the name --data.corpus
_LEFT = "unrecognized arguments"  # argparse's words for values without a name
TIMED = ("fit", "validate")  # get the time when the process began, from which their limits count, and `alone`
_USAGE = """usage: gpt COMMAND [OPTIONS]

Train a small GPT on your own text and generate text with it:

  gpt fit my-text.txt --minutes 10   # without a text: Python's documentation
  gpt generate --prompt 'The'        # with the newest run

commands:
{}

'gpt COMMAND --help' lists the options of a command, with an example.
'gpt --version' prints the version."""


def main(arguments: list[str] | None = None) -> int:
    """Run one command, by default the command line's; for bad input print one line and return its status."""
    began = time.perf_counter()
    alone = arguments is None  # the process does nothing else
    arguments = sys.argv[1:] if arguments is None else arguments
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # its encoding may not have all characters
            stream.reconfigure(errors="backslashreplace")
    try:
        if not arguments or arguments[0] in ("-h", "--help"):
            lines = [f"  {name:<11} {command.purpose}" for name, command in COMMANDS.items()]
            print(_USAGE.format("\n".join(lines)))
        elif arguments[0] == "--version":
            from importlib.metadata import version  # half of the imports of `gpt --help`

            print(f"gpt {version('minimal-gpt')}")
        else:
            run(arguments[0], arguments[1:], began, alone)
        if sys.stdout is not None:  # a process may be started without stdout
            sys.stdout.flush()
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - the pipe's reader has ended
        return 0
    except KeyboardInterrupt:
        print(f"gpt {arguments[0]}: interrupted", file=sys.stderr)
        return 130
    except (InputError, OSError) as error:
        if os.environ.get("GPT_TRACEBACK"):
            raise
        line = " ".join(f"gpt {arguments[0]}: {message(error)}".split())
        safe = (character if character.isprintable() else ascii(character)[1:-1] for character in line)
        print("".join(safe), file=sys.stderr)
        return error.status if isinstance(error, InputError) else InputError.status
    return 0


def run(name: str, arguments: list[str], began: float, alone: bool) -> None:
    """Import the command's code and call it with its options; InputError for options that cannot be used.

    `began` is when the process started, by `time.perf_counter`: imports count towards the minutes of a run.
    `alone` says that the process does nothing else than this command. `fit` and `validate` import more later.
    """
    if name not in COMMANDS:
        meant = did_you_mean(name, COMMANDS, before=", ") or f", expected one of {', '.join(COMMANDS)}"
        raise InputError(f"unknown command{meant}")
    ensure_home()
    limit_threads()
    if name in WITH_TEXT:
        _look_for_text(arguments)
    with importing(alone):
        function: Callable[..., object] = resolve_name(f"gpt.{COMMANDS[name].code}")
    if not COMMANDS[name].example:
        more = {"began": began, "alone": alone} if name in TIMED else {}
        with _told_as_input_errors(name):
            function([name, *arguments], **more)
        return
    with _told_as_input_errors(name):
        options = _options(name, function, arguments)
    output = function(**options)
    if isinstance(output, Path):
        print(output)  # so that another command can use it


@contextmanager
def _told_as_input_errors(name: str) -> Iterator[None]:
    """Raise an InputError that names the command's help for whatever parsing its options raises."""
    import jsonargparse

    try:
        yield
    except (argparse.ArgumentError, jsonargparse.ArgumentError, UnicodeDecodeError, RecursionError) as error:
        late = "; a value without a name stands before all options" if _LEFT in str(error) else ""
        raise InputError(f"{error}{late} (see 'gpt {name} --help')") from None


def _options(name: str, function: Callable[..., object], arguments: list[str]) -> dict[str, object]:
    """Parse the arguments of a command whose options are the function's parameters; return their values."""
    import jsonargparse

    hints = _hints(function)
    parser = _parser(name, function)
    spelled = _spell_out(arguments, function)
    _check_names(spelled, function)
    try:
        parsed = parser.parse_args(spelled)
        for option, hint in hints.items():
            if parsed[option] is None:
                check_not_null(option, hint, kind_in_words(_kind_of(hint)[0]))
        options = parser.instantiate(parsed)
    except jsonargparse.ArgumentError:
        kinds = {option: _kind_of(hint) for option, hint in hints.items()}
        typed = {option: kind for option, (kind, several) in kinds.items() if not (kind is _text or several)}
        check_options(parser, spelled, typed)
        raise  # a value has no option, or a file has a wrong one
    given = {option: options[option] for option in hints}
    for option, value in given.items():
        if value is not None and _is_path(hints[option]):
            given[option] = Path(value)
        if isinstance(value, str) and _kind_of(hints[option])[1]:  # of a file for --config
            given[option] = [value]
    return given


def _hints(function: Callable[..., object]) -> dict[str, object]:
    """Return the type of each parameter of a function, which is an option of its command."""
    return {name: hint for name, hint in get_type_hints(function).items() if name != "return"}


def _look_for_text(arguments: list[str]) -> None:
    """Raise InputError if the command line names a text and there is none of this name.

    The command would find this out too, but first it imports torch, which takes seconds.
    """
    from gpt.data.find import check_exists

    reads_no_text = {"-h", "--help", "--print_config"} & set(arguments)
    given = dict(values_in(with_first(arguments, "data.corpus")))
    text = given.get("data.corpus")  # None, too, for the option without a value, which its parser refuses
    if text is not None and not reads_no_text:
        check_exists(text)


def _check_names(arguments: list[str], function: Callable[..., object]) -> None:
    """Raise InputError for a word that looks like an option but names none; it suggests the most similar."""
    names = [*inspect.signature(function).parameters, "config", "print_config", "help"]
    for argument in takewhile(lambda word: word != "--", arguments):  # what follows are values
        name = re.split("[=.]", argument.removeprefix("--"), maxsplit=1)[0]
        if argument.startswith("--") and name not in names:
            meant = did_you_mean(name, names, shown="--{}".format)
            raise InputError(f"there is no option --{name}{meant}")


def _parser(name: str, function: Callable[..., object]) -> "ArgumentParser":
    """Build a command's parser: its options are the function's parameters, their help is its docstring."""
    import jsonargparse
    from docstring_parser import parse_from_object

    from gpt.help import HelpFormatter, value_name

    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)  # of a dataclass's fields
    jsonargparse.set_loader("plain", parse_yaml, (ValueError,))  # without aliases
    jsonargparse.set_dumper("plain", json.dumps)
    docstring = parse_from_object(function)
    texts = {param.arg_name: " ".join((param.description or "").split()) for param in docstring.params}
    parser = jsonargparse.ArgumentParser(
        prog=f"gpt {name}",
        usage=_usage(name, function),
        description=docstring.description,
        epilog=f"example: gpt {name} {COMMANDS[name].example}",
        formatter_class=HelpFormatter,
        parser_mode="plain",
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", action="config", help="options from a YAML file")
    parameters = inspect.signature(function).parameters
    for option, hint in _hints(function).items():
        kind, several = _kind_of(hint)
        default = parameters[option].default
        if default is inspect.Parameter.empty:  # a positional argument: the corpus, or the runs
            nargs = "+" if several else None
            parser.add_argument(option, type=kind, help=texts[option], nargs=nargs)
            continue
        how: dict[str, Any] = {"action": "append"} if several else {}
        if not is_dataclass(kind):
            value = value_name(option, kind)
            how["metavar"] = f"[{value}]" if kind is bool else value
        default = str(default) if isinstance(default, Path) else default
        parser.add_argument(f"--{option}", type=kind, default=default, help=texts[option], **how)
    return parser


def _usage(name: str, function: Callable[..., object]) -> str:
    """Return a command's usage: its first parameter may be given without its name."""
    option, parameter = next(iter(inspect.signature(function).parameters.items()))
    first = option.upper()
    if parameter.default is not inspect.Parameter.empty:
        first = f"[{first}]"
    elif _kind_of(_hints(function)[option])[1]:
        first += "..."
    return f"gpt {name} {first} [--NAME VALUE]..."


def _kind_of(hint: object) -> tuple[object, bool]:
    """Return the type of an option's value, and whether the option takes several values.

    Text and paths are taken as they are typed, even `null`, `~` and `[end]`. jsonargparse would read a value
    that may be None or a list as YAML, so such an option is declared with the type of its text only.
    """
    kinds = (*get_args(hint), hint)
    if list[str] in kinds:
        return _texts, True
    return (_text if str in kinds or Path in kinds else hint), False


class _Text:
    """The type of an option whose value is text: it is taken as it is typed.

    jsonargparse would read a `str` as YAML, which has to be valid UTF-8.
    """

    def __call__(self, typed: object) -> object:
        return str(typed)

    def __repr__(self) -> str:
        return "text"  # in the help


class _Texts(_Text):
    """The type of a value of an option that takes several texts; a file for --config may list them."""

    def __call__(self, typed: object) -> object:
        if not isinstance(typed, list):
            return str(typed)
        if None in typed:
            raise ValueError("expected a list of text, got null in it")
        return [str(text) for text in typed]


_text = _Text()
_texts = _Texts()


def _is_path(hint: object) -> bool:
    """Whether an option's value is a path rather than text."""
    kinds = (*get_args(hint), hint)
    return Path in kinds and str not in kinds


def _spell_out(arguments: list[str], function: Callable[..., object]) -> list[str]:
    """Return the same arguments, written in full.

    A word before the options is the value of the first parameter. `--flag` without a value means
    `--flag=true`. A word that begins with a dash is the value of the option before it, unless it names an
    option itself.
    """
    parameters = list(inspect.signature(function).parameters.values())
    if parameters[0].default is not inspect.Parameter.empty:  # it is optional, as a checkpoint is
        arguments = with_first(arguments, parameters[0].name)
    flags = {f"--{parameter.name}" for parameter in parameters if parameter.annotation is bool}
    options = {f"--{parameter.name}" for parameter in parameters} | {"--config", "--help", "-h"}

    def is_option(word: str) -> bool:
        return re.split("[=.]", word, maxsplit=1)[0] in options

    spelled: list[str] = []
    for word, following in pairwise([*arguments, "--"]):
        before = spelled[-1] if spelled else ""
        if word in flags and following.startswith("--"):
            spelled.append(f"{word}=true")
        elif is_option(before) and "=" not in before and word.startswith("-") and not is_option(word):
            spelled[-1] = f"{before}={word}"
        else:
            spelled.append(word)
    return spelled


def message(error: BaseException) -> str:
    """Return an error's message, with the file's name if the system reports one."""
    if isinstance(error, OSError) and error.strerror:
        name = error.filename2 or error.filename  # the second is the target of a rename
        return f"{name}: {error.strerror}" if name else error.strerror
    return str(error)


if __name__ == "__main__":  # also started as `torchrun -m gpt.cli`
    sys.exit(main())
