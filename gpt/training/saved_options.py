"""The options that a checkpoint or a run's config.yaml carries: plain values of known groups, or refused.

jsonargparse imports and instantiates what an option names, and reads files and URLs that stand where a group
of options belongs; Lightning unpickles where `weights_only` is false. Users may ask for that, files may not.
"""

from collections.abc import Collection, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import Namespace

from gpt.errors import InputError
from gpt.template import DEFAULT_TEMPLATE

OLD_NAMES = {"model.config.tied_head": "model.config.tie_embeddings"}
"""Names that options have in older runs and command lines."""

_GROUPS = ("model", "model.config", "model.optimizer", "model.lora", "data", "data.template", "trainer")
_UNGROUPED = (
    *("seed_everything", "run", "checkpoint_every", "keep_checkpoints", "log_every", "early_stopping"),
    *("minutes", "planned_steps", "snapshot_megabytes"),
)
_DURATIONS = ("trainer.max_time", "trainer.val_check_interval")  # may be {hours: 1}
_CLASSES = {  # options that can name a class, and the harmless names among their values
    "trainer.accelerator": ("auto", "cpu", "cuda", "gpu", "mps", "tpu"),
    "trainer.strategy": (
        *("auto", "ddp", "ddp_fork", "ddp_notebook", "ddp_spawn", "ddp_find_unused_parameters_true"),
        *("ddp_find_unused_parameters_false", "fsdp2"),
    ),
    "trainer.profiler": ("simple", "advanced"),
    **dict.fromkeys(("trainer.logger", "trainer.callbacks", "trainer.plugins", "trainer.model_registry"), ()),
}
_CHOSEN_ANEW = ("config", "resume", "ckpt_path", "trainer.default_root_dir", "profile")
_LONGEST = 1 << 16

_FIXED = ("model.config.", "model.optimizer.name")  # what the saved tensors depend on
_FREE = ("model.config.dropout",)
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
                f"{source}: its saved option {name} {reason}; nothing that a file names is imported or "
                f"fetched. If you trust it, give it yourself: --{name} ..."
            )
    return Namespace(options).as_dict()  # type: ignore[no-untyped-call]


def with_new_names(options: dict[str, Any]) -> dict[str, Any]:
    """Nested options, those with an old name renamed."""
    flat = dict(leaves(options))
    if not OLD_NAMES.keys() & flat:
        return options
    renamed = {OLD_NAMES.get(name, name): value for name, value in flat.items()}
    return Namespace(renamed).as_dict()  # type: ignore[no-untyped-call]


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
            if masters or (name.startswith(_FIXED) and name not in _FREE):
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
    if last == "weights_only":
        return None if value is None else "decides how files are unpickled"
    if name in _GROUPS or (group not in _GROUPS and name not in _UNGROUPED):
        return "is not one that a run saves"
    if last in ("class_path", "init_args", "dict_kwargs") or not last.isidentifier():
        return "names a class"
    if group == "data.template":
        return None if isinstance(value, str) else "is not text"
    if name in _CLASSES:
        plain = value is None or isinstance(value, bool) or value in _CLASSES[name]
        return None if plain else f"names a class ({_shortened(value)})"
    parts = list(value.values()) if isinstance(value, dict) and name in _DURATIONS else value
    for part in parts if isinstance(parts, list) else [parts]:
        if not (part is None or isinstance(part, bool | int | float | str)):
            return "is not a plain value"
        if "://" in str(part) or "::" in str(part) or str(part).startswith(("hub:", "//", "\\\\")):
            return f"leads to another machine ({_shortened(part)})"
    if name == "model.init_from" and value is not None and not Path(str(value)).exists():
        return f"may lead to another machine ({_shortened(value)})"
    if name == "data.corpus" and str(value).endswith(".yaml"):
        return f"is a recipe file, which may lead to another machine ({_shortened(value)})"
    return None


def _shortened(value: Any) -> str:
    shown = value.get("class_path", "a mapping") if isinstance(value, dict) else value
    shown = str(shown)[:80]
    return shown if shown.isprintable() else repr(shown)
