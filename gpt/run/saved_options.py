"""The options of a run, and what a checkpoint or a run's config.yaml may say of them: plain values alone.

jsonargparse imports and instantiates what an option names, and reads files and URLs that stand where a group
of options belongs; Lightning unpickles where `weights_only` is false. Users may ask for that, files may not.
"""

import re
import reprlib
from collections.abc import Collection, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import Namespace

from gpt.errors import InputError
from gpt.text.template import DEFAULT_TEMPLATE

_AUTO = "'auto' for the newest checkpoint of --run or of all runs, 'auto_or_new' to begin --run without one"
OPTIONS: dict[str, tuple[type | None, Any, str]] = {
    "run": (None, "run", "name of the folder under runs/ to write to"),
    "resume": (None, None, f"resume a run: its folder, a checkpoint, {_AUTO}"),
    "ckpt_path": (None, None, "checkpoint or folder of the run that 'gpt validate' scores"),
    "checkpoint_every": (int, 500, "steps between two last.ckpt"),
    "keep_checkpoints": (int, 2, "newest checkpoints to keep"),
    "log_every": (int, 20, "steps between two rows of metrics.csv"),
    "snapshot_megabytes": (int, 100, "of snapshots to watch it learn with gpt serve, at most; 0 for none"),
    "early_stopping": (int, None, "stop after so many validations in a row that do not improve val_loss"),
    "minutes": (float, None, "train the best model for the text that this time allows, from start to end"),
    "profile": (None, False, "trace some steps: profile.json and profile.txt"),
    "planned_steps": (None, None, "STEP:TOTAL,...: how a planned run kept its time"),
}
"""Beside those of the model, the data and the Trainer: type, default and help."""

OLD_NAMES = {"model.config.tied_head": "model.config.tie_embeddings"}
"""Names that options have in older runs and command lines."""

_GROUPS = ("model", "model.config", "model.optimizer", "model.lora", "data", "data.template", "trainer")
_CLASSES = {  # options that can name a class, and the harmless names among their values
    "accelerator": ("auto", "cpu", "cuda", "gpu", "mps", "tpu"),
    "strategy": (
        *("auto", "ddp", "ddp_find_unused_parameters_true", "ddp_find_unused_parameters_false", "fsdp2"),
    ),
    **dict.fromkeys(("profiler", "logger", "callbacks", "plugins", "model_registry"), ()),
}
_ELSEWHERE = re.compile(r"://|::|^(hub:|//|\\\\)")  # an address, a chain of fsspec's, another machine's file
_CHOSEN_ANEW = ("config", "resume", "ckpt_path", "trainer.default_root_dir", "profile")
_LONGEST = 1 << 16

_FIXED = ("model.config.", "model.optimizer.name")  # what the saved tensors depend on
_NOT_COMPARED = (*_CHOSEN_ANEW, "run", "minutes", "snapshot_megabytes", "model.init_from")


def plain_options(
    text: str, source: Path, given: Collection[str] = (), unused: Collection[str] = ()
) -> dict[str, Any]:
    """The options in the YAML `text` of `source`, nested, without those that each run chooses anew.

    InputError: an option could import, fetch or unpickle something, or is not one that a run saves. Names in
    `given` are on the command line, which replaces them; those in `unused` may be anything.
    """
    try:
        saved = yaml.safe_load(text) if isinstance(text, str) and len(text) <= _LONGEST else None
    except (yaml.YAMLError, RecursionError, ValueError):
        saved = None
    if not isinstance(saved, dict):
        raise InputError(f"{source}: its saved options are not YAML options of at most {_LONGEST} characters")
    options: dict[str, Any] = {}
    for name, value in leaves(saved):
        name = OLD_NAMES.get(name, name)
        if name in _CHOSEN_ANEW or (name == "weights_only" and value is None):  # of older runs
            continue
        if name in unused or not (reason := _objection(name, value)):
            options[name] = value
        elif name not in given:
            raise InputError(
                f"{source}: its saved option {name} {reason} ({reprlib.repr(value)}); nothing that a file "
                f"names is imported or fetched. If you trust it, give it yourself: --{name} ..."
            )
    return Namespace(options).as_dict()  # type: ignore[no-untyped-call]


def as_argument(options: dict[str, Any]) -> str:
    """The options as a value of `--config`.

    jsonargparse looks for a file of that name first; no file name is as long as this comment.
    """
    return f"# {'options of a saved run'.ljust(300, '.')}\n{yaml.safe_dump(options)}"


def changes(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The options that differ, as `name: old -> new`; InputError for one that the weights depend on."""
    default = {"data": {"template": asdict(DEFAULT_TEMPLATE)}}  # of runs from before there were templates
    old, new = (dict(leaves(default)) | dict(leaves(options)) for options in (saved, now))
    changed = []
    for name in sorted({*old, *new} - set(_NOT_COMPARED)):
        before, after = old.get(name), new.get(name)
        if before != after:
            masters = name == "trainer.precision" and "bf16-true" in (before, after)
            if masters or (name.startswith(_FIXED) and name != "model.config.dropout"):
                raise InputError(f"{name} is {before} in the checkpoint and cannot become {after}")
            changed.append(f"{name}: {before} -> {after}".replace("\n", "\\n"))
    return changed


def leaves(values: dict[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each option with its dotted name."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if name in _GROUPS and isinstance(value, dict):
            yield from leaves(value, f"{name}.")
        else:
            yield name, value


def _objection(name: str, value: Any) -> str | None:
    """Why a saved option is refused; None for a plain value."""
    group, _, last = name.rpartition(".")
    if name in _GROUPS or (group not in _GROUPS and name not in ("seed_everything", *OPTIONS)):
        return "is not one that a run saves"
    if last == "weights_only":
        return "decides how files are unpickled"
    if last in ("class_path", "init_args", "dict_kwargs") or not last.isidentifier():
        return "names a class"
    if group == "data.template":
        return None if isinstance(value, str) else "is not text"
    if last in _CLASSES:
        plain = value is None or isinstance(value, bool) or value in _CLASSES[last]
        return None if plain else "names a class"
    if name == "trainer.max_time" and isinstance(value, dict):  # {hours: 1}
        value = list(value.values())
    for part in value if isinstance(value, list) else [value]:
        if not isinstance(part, int | float | str | None):
            return "is not a plain value"
        if _ELSEWHERE.search(str(part)):
            return "leads to another machine"
    if name == "model.init_from" and value is not None and not Path(str(value)).exists():
        return "may lead to another machine"
    if name == "data.corpus" and str(value).endswith(".yaml"):
        return "is a recipe file, which may lead to another machine"
    return None
