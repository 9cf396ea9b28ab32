"""What `gpt fit` and `gpt validate` do to the command line before LightningCLI parses it.

Options come from, each overriding the one before: the defaults in the code, the run that is resumed, the YAML
files named with `--config`, the command line.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gpt.errors import InputError
from gpt.files import shipped
from gpt.training.folder import folder_of_checkpoint
from gpt.training.output import report
from gpt.training.resume import AUTO_OR_NEW, Found, find
from gpt.training.saved_options import OLD_NAMES, as_argument, plain_options, with_new_names

_SCANNED = ("run", "resume", "ckpt_path", "model.init_from")


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """A command line for LightningCLI, and what it resumes."""

    command: str
    args: list[str]
    found: Found | None = None
    """The checkpoint that is resumed or validated."""
    saved: dict[str, Any] | None = None
    """The options that this checkpoint carries."""
    restart: bool = False
    """Whether to begin in the run's own folder although it exists."""
    defaults: tuple[Path, ...] = ()
    """Files of options whose values the help shows as defaults."""
    init_from: str | None = None
    """The weights that the resumed run began with."""


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
    found = saved = init_from = None
    in_files = {
        name: str(value) for _, values in files for name, value in values.items() if value is not None
    }
    help_only = bool({"-h", "--help"} & set(rest))
    run = known["run"] or in_files.get("run")
    resume = known["resume"] or in_files.get("resume") if command == "fit" else None
    checkpoint = known["ckpt_path"] or in_files.get("ckpt_path")
    if command == "validate" and not checkpoint and not help_only:
        raise InputError("nothing to validate: give a checkpoint or a run's folder with --ckpt_path")
    if resume or checkpoint:
        found = find(str(resume or checkpoint), run)
    if found:
        folder = folder_of_checkpoint(found.path)
        if folder and known["run"] not in (None, folder.name):
            raise InputError(
                f"--run {known['run']} is not the run that is resumed, {folder}: leave --run out"
            )
        saved = plain_options(found.options, found.path, given, dropped=("model.init_from",))
        init_from = yaml.safe_load(found.options).get("model", {}).get("init_from")
        configs.insert(0, as_argument(saved))
        rest.append(f"--ckpt_path={found.path}")
    recipe = shipped("configs") / ("finetune.yaml" if known["model.init_from"] is not None else "quick.yaml")
    if not configs and not help_only:
        configs = [str(recipe)]
    return Arguments(
        command=command,
        args=[command, *(f"--config={config}" for config in configs), *rest],
        found=found,
        saved=saved,
        restart=resume == AUTO_OR_NEW,
        defaults=(recipe,) if help_only else (),
        init_from=init_from,
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
