"""What `gpt fit` and `gpt validate` do to the command line before LightningCLI parses it.

Options come from, each overriding the one before: the defaults in the code, the run that is resumed, the YAML
files named with `--config`, the command line.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch.utilities import rank_zero_only

from gpt.errors import InputError
from gpt.files import shipped
from gpt.training.resume import AUTO_OR_NEW, Found, find
from gpt.training.saved_options import OLD_NAMES, as_argument, plain_options, with_new_names

_SCANNED = ("run", "resume", "ckpt_path", "model.init_from")


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """A command line for LightningCLI, and what it resumes."""

    args: list[str]
    found: Found | None = None
    """The checkpoint that `fit` resumes."""
    saved: dict[str, Any] | None = None
    """The options that this checkpoint carries."""
    restart: bool = False
    """Whether to begin in the run's own folder although it exists."""


def complete(args: list[str]) -> Arguments:
    """Add the options of the run that is resumed or validated, or those of the shipped default recipe.

    Raises:
        InputError: there is no such run, or a file of options cannot be used.
    """
    command, *args = _with_new_names(args)
    scanner = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    scanner.add_argument("-c", "--config", action="append", default=[])
    for name in _SCANNED:
        scanner.add_argument(f"--{name}")
    scanned, rest = scanner.parse_known_args(args)
    known = vars(scanned)
    given = {argument.partition("=")[0].removeprefix("--") for argument in args if argument.startswith("--")}
    files = [_read_config(value, given) for value in known["config"]]
    configs = [argument for argument, _ in files]
    rest = [
        *(f"--{name}={known[name]}" for name in ("run", "model.init_from") if known[name] is not None),
        *rest,
    ]
    found = saved = None
    checkpoint, resume = known["ckpt_path"], known["resume"]
    if command == "fit" and (resume or checkpoint):
        runs = [known["run"], *(values.get("run") for _, values in reversed(files))]
        found = find(resume or checkpoint, next((run for run in runs if run is not None), None))
    elif checkpoint:
        found = find(checkpoint)
    if found:
        saved = plain_options(found.options, found.path, given, dropped=("model.init_from",))
        configs.insert(0, as_argument(saved))
        rest.append(f"--ckpt_path={found.path}")
    if not configs and not {"-h", "--help"} & set(rest):
        recipe = "finetune.yaml" if known["model.init_from"] is not None else "quick.yaml"
        configs = [str(shipped("configs") / recipe)]
    return Arguments(
        args=[command, *(f"--config={config}" for config in configs), *rest],
        found=found if command == "fit" else None,
        saved=saved,
        restart=resume == AUTO_OR_NEW,
    )


def _with_new_names(args: list[str]) -> list[str]:
    """The arguments with options renamed that have an old name, and a line on stderr for each."""
    renamed = []
    for argument in args:
        name, equals, value = argument.partition("=")
        if (new := OLD_NAMES.get(name.removeprefix("--"))) and name.startswith("--"):
            report(f"{name} is now called --{new}")
            argument = f"--{new}{equals}{value}"
        renamed.append(argument)
    return renamed


def _read_config(argument: str, given: set[str]) -> tuple[str, dict[str, Any]]:
    """A value of `--config`, with plain options in the place of a run's config.yaml, and its options.

    Raises:
        InputError: the file is not YAML.
    """
    path = Path(argument)
    if not path.is_file():
        return argument, {}
    try:
        text = path.read_text(encoding="utf-8")
        if (path.parent / "checkpoints").is_dir():  # a run's folder, which may come from elsewhere
            options = plain_options(text, path, given)
            return as_argument(options), options
        values = yaml.safe_load(text)
    except (UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise InputError(f"--config {path} is not YAML: {error}") from None
    if not isinstance(values, dict):
        return argument, {}
    renamed = with_new_names(values)
    return (argument if renamed == values else as_argument(renamed)), renamed


@rank_zero_only
def report(*lines: str) -> None:
    """Print lines on stderr, on the first process alone."""
    for line in lines:
        print(f"gpt fit: {line}", file=sys.stderr)
