"""What `gpt fit` and `gpt validate` do to the command line before LightningCLI parses it.

Options come from, each overriding the one before: the defaults in the code, the run that is resumed, the YAML
files named with `--config`, the command line.
"""

import argparse
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from gpt.errors import InputError
from gpt.files import shipped
from gpt.plan.command import PLANNED_AROUND, number, planner
from gpt.plan.law import Law
from gpt.plan.plan import Plan
from gpt.run.folder import folder_of_checkpoint
from gpt.run.resume import Found, find
from gpt.run.saved_options import OLD_NAMES, as_argument, leaves, plain_options
from gpt.training.output import report

_SCANNED = ("run", "resume", "ckpt_path", "model.init_from", "minutes")
_UNPLANNED = (
    *("resume", "ckpt_path", "model.init_from", "data.tokens_per_update"),
    *(f"trainer.{name}" for name in ("max_steps", "max_epochs", "max_time", "limit_val_batches")),
    *(f"trainer.{name}" for name in ("devices", "num_nodes", "strategy", "accumulate_grad_batches")),
)


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """A command line for LightningCLI, and what it resumes."""

    command: str  # fit or validate
    args: list[str]
    found: Found | None = None  # the checkpoint that `fit` resumes
    saved: dict[str, Any] = field(default_factory=dict)  # the options that it carries
    defaults: tuple[str, ...] = ()  # files of options whose values the help shows as defaults
    plan: Plan | None = None  # what --minutes has planned


def complete(args: list[str]) -> Arguments:
    """Add the options of the run that is resumed or validated, of a plan, or of the default recipe."""
    command, *args = _with_new_names(args)
    known, rest = _scan(args, _SCANNED)
    named = {argument.partition("=")[0].removeprefix("--") for argument in args if argument.startswith("--")}
    name = "quick" if "model.init_from" not in known else "finetune"
    recipe = str(shipped("configs") / f"{'lora' if 'model.lora.rank' in named else name}.yaml")
    if {"-h", "--help"} & {*rest}:
        return Arguments(command=command, args=["--help"], defaults=(recipe,) if command == "fit" else ())
    configs: list[str] = []
    given: dict[str, Any] = {}  # options of the files, and above them of the command line
    for config in known.pop("config", []):
        argument, options = _read_config(config, named)
        configs.append(argument)
        given |= {name: value for name, value in leaves(options) if value is not None}
    given |= known
    given |= {name: str(given[name]) for name in _SCANNED if name in given}
    wanted = given.get("resume" if command == "fit" and "resume" in given else "ckpt_path")
    if command == "validate" and not wanted:
        raise InputError("nothing to validate: give a checkpoint or a run's folder with --ckpt_path")
    if command == "validate" and "minutes" in given:
        raise InputError(f"--minutes {given['minutes']} plans a training: it is for gpt fit")
    found = None if wanted is None else find(wanted, given.get("run"))
    saved: dict[str, Any] = {}
    if found:
        folder = folder_of_checkpoint(found.path)
        if folder and (other := known.get("run", folder.name)) != folder.name:
            raise InputError(f"--run {other} is not the run that is resumed, {folder}: leave --run out")
        saved = plain_options(found.options, found.path, named, unused=("model.init_from",))
        began = str(dict(leaves(saved)).get("model.init_from"))
        if (other := known.get("model.init_from", began)) != began:  # one command may start and resume a run
            raise InputError(
                f"--model.init_from {other}: the run that is resumed began from {began}: leave it out"
            )
        configs.insert(0, as_argument(saved))
        rest.append(f"--ckpt_path={found.path}")
    plan = None
    if "minutes" in given:
        given |= _scan(args, (*PLANNED_AROUND, *_UNPLANNED))[0]
        if others := ", ".join(f"--{name}" for name in _UNPLANNED if name in given):
            raise InputError(f"--minutes plans a new run of one process to its end: leave {others} out")
        plan = planner(given)(number("minutes", given["minutes"]))
        report(str(plan))
        configs.insert(0, as_argument(plan.options(Law.load())))
    kept = [f"--{name}={known[name]}" for name in ("run", "resume", "model.init_from") if name in known]
    return Arguments(
        command=command,
        args=[*(f"--config={config}" for config in configs or [recipe]), *kept, *rest],
        found=found if command == "fit" else None,
        saved=saved,
        plan=plan,
    )


def _scan(args: list[str], names: tuple[str, ...]) -> tuple[dict[str, Any], list[str]]:
    """The values of these options and of `--config`, as far as they are given, and the other arguments."""
    scanner = argparse.ArgumentParser(
        add_help=False, allow_abbrev=False, exit_on_error=False, argument_default=argparse.SUPPRESS
    )
    scanner.add_argument("-c", "--config", action="append")
    for name in names:
        scanner.add_argument(f"--{name}")
    scanned, rest = scanner.parse_known_args(args)
    return vars(scanned), rest


def _with_new_names(args: list[str]) -> list[str]:
    """The arguments with options renamed that have an old name, and a line on stderr for each."""
    for old, new in OLD_NAMES.items():
        if any(argument.partition("=")[0] == f"--{old}" for argument in args):
            report(f"--{old} is now called --{new}")
            args = [re.sub(f"^--{re.escape(old)}(?==|$)", f"--{new}", argument) for argument in args]
    return args


def _read_config(argument: str, given: set[str]) -> tuple[str, dict[str, Any]]:
    """A value of `--config`, with plain options in the place of a run's config.yaml, and its options."""
    recipes = {file.stem: str(file) for file in shipped("configs").glob("*.yaml")}
    path = argument if os.path.isfile(argument) else recipes.get(argument)
    if path is None and re.fullmatch(r"[\w./\\-]+", argument):  # not options as YAML
        raise InputError(f"--config {argument}: no such file, nor one of {', '.join(sorted(recipes))}")
    try:
        text = Path(path).read_text(encoding="utf-8") if path else argument
        values = yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise InputError(f"--config {path or ''} cannot be read: {error}") from None
    if path and (Path(path).parent / "checkpoints").is_dir():  # a run's folder, which may come from elsewhere
        options = plain_options(text, Path(path), given)
        return as_argument(options), options
    options = dict(leaves(values)) if isinstance(values, dict) else {}
    if OLD_NAMES.keys() & options:
        options = {OLD_NAMES.get(name, name): value for name, value in options.items()}
        return as_argument(options), options
    return path or argument, options
