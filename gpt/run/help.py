"""The help of `gpt fit` and `gpt validate`: the options that people often want, in groups."""

import textwrap
from typing import Any

from docstring_parser import parse_from_object

from gpt.run.arguments import described, recipe_file
from gpt.run.options import OPTIONS, flat

_GROUPS = {
    "": "The run",
    "data": "The text",
    "trainer": "Training",
    "model": "The model",
    "model.config": "Its shape",
    "model.optimizer": "The recipe of the updates",
    "model.lora": "Adapters",
}
RARE = (
    *("seed_everything", "keep_checkpoints", "snapshot_megabytes", "model.checkpoint_activations"),
    *(
        "model.loss_chunk",
        "model.skip_nonfinite",
        "data.errors",
        "data.num_workers",
        "data.isolate",
        "data.pack",
    ),
    *("data.template.system", "data.template.user", "data.template.assistant", "trainer.detect_anomaly"),
    *("trainer.deterministic", "trainer.min_steps", "trainer.num_nodes", "trainer.enable_progress_bar"),
    *(
        "model.config.exact_gelu",
        "model.config.tie_embeddings",
        "model.config.qkv_bias",
        "model.lora.dropout",
    ),
    *("model.optimizer.betas", "model.optimizer.momentum", "model.optimizer.decay_fraction"),
    *("model.optimizer.final_lr_fraction", "model.lora.alpha", "data.text_column"),
)
"""Options that stand in docs/options.md alone."""

_HEAD = """usage: gpt fit [TEXT] [--NAME VALUE]...

Train a model on a text: a file, a folder, a pattern, a recipe or a data set of the hub.

--config NAME|FILE      options from a file, or from a recipe of configs/; several override one another
--print_config          print all options as a file, and train nothing
"""
_VALIDATE = """usage: gpt validate --ckpt_path RUN|CHECKPOINT [--NAME VALUE]...

Print the loss and the bits per byte of a run's checkpoint on the text that is held out.
Options are those of gpt fit, by default those of the run.

example: gpt validate --ckpt_path runs/quick"""
_TAIL = """
Defaults are those of configs/quick.yaml. Rare options: docs/options.md.

example: gpt fit my.txt --minutes 10 --run mine"""


def show_help(command: str) -> None:
    """Print it."""
    if command == "validate":
        print(_VALIDATE)
        return
    from gpt.plain import parse_yaml

    recipe = dict(flat(parse_yaml(recipe_file("quick"))))
    print(_HEAD)
    for group, title in _GROUPS.items():
        print(f"{title}:")
        for name, option in OPTIONS.items():
            if name.rpartition(".")[0] == group and name not in RARE:
                _show(name, recipe.get(name, option.default), _texts(option.group)[name.rpartition(".")[2]])
        print()
    print(_TAIL.strip())


def _show(name: str, default: Any, text: str) -> None:
    kind = described(OPTIONS[name].kind).removesuffix(" or null")
    default = "" if default is None else f" ({default})"
    print(f"  --{name}  {kind}{default}")
    first = text.split(". ")[0].strip().rstrip(".")
    print(textwrap.fill(f"{first}.", 100, initial_indent="      ", subsequent_indent="      "))


def _texts(kind: type) -> dict[str, str]:
    """What the source says below each field."""
    found = parse_from_object(kind)
    return {param.arg_name: " ".join((param.description or "").split()) for param in found.params}
