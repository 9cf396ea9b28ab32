"""The help of `gpt fit` and `gpt validate`, and what people meant by an unknown option.

Both read what stands below the options' fields, see `gpt.run.options`.
"""

import difflib
import re
import textwrap
from collections.abc import Mapping

from docstring_parser import parse_from_object

from gpt.run.options import OPTIONS

_GROUPS = {
    "": "The run",
    "data": "The text",
    "trainer": "Training",
    "model": "The model",
    "model.config": "Its shape",
    "model.optimizer": "The recipe of the updates",
    "model.lora": "Adapters",
}
_HEAD = """usage: gpt fit [TEXT] [--NAME VALUE]...

Train a model on a text: a file, a folder, a pattern, a recipe or a data set of the hub.

--config NAME|FILE      options from a file, or from a recipe of configs/; several override one another
--print_config          print all options as a file, and train nothing
"""
_VALIDATE = """usage: gpt validate --ckpt_path RUN|CHECKPOINT [--NAME VALUE]...

Print the loss and the bits per byte of a run's checkpoint on the text that is held out.
Options are those of gpt fit, by default those of the run.

example: gpt validate --ckpt_path runs/quick"""
_TAIL = """Defaults are those of configs/quick.yaml. Rare options: docs/options.md.

example: gpt fit my.txt --minutes 10 --run mine"""


def show_help(command: str) -> None:
    """Print it."""
    if command == "validate":
        print(_VALIDATE)
        return
    from gpt.plain import parse_yaml
    from gpt.run.arguments import as_texts, described, recipe_file

    recipe, texts = as_texts(parse_yaml(recipe_file("quick"))), _texts()
    print(_HEAD)
    for group, title in _GROUPS.items():
        print(f"{title}:")
        for name, option in OPTIONS.items():
            if name.rpartition(".")[0] != group or " Rare." in texts[name]:
                continue
            kind = described(option.kind).removesuffix(" or null")
            default = recipe.get(name, option.default)
            print(f"  --{name}  {kind}{'' if default is None else f' ({default})'}")
            first = texts[name].split(". ")[0].rstrip(".")
            print(textwrap.fill(f"{first}.", 100, initial_indent="      ", subsequent_indent="      "))
        print()
    print(_TAIL)


def meant(name: str) -> str:
    """What to say after an unknown option's name: the nearest one, if any is near."""
    last = name.rpartition(".")[2]
    ends = {option.rpartition(".")[2]: option for option in OPTIONS}
    elsewhere = {
        other: option
        for option, text in _texts().items()
        for other in re.findall(r"\w+", text.partition(" Elsewhere: ")[2])
    }
    near = [option for option in OPTIONS if option.rpartition(".")[2] == last]
    near = near or [elsewhere[other] for other in (name, last) if other in elsewhere][:1]
    near = near or difflib.get_close_matches(name, OPTIONS, 1)
    near = near or [ends[end] for end in difflib.get_close_matches(last, ends, 1)]
    return f"; did you mean {' or '.join(f'--{option}' for option in near)}?" if near else ""


def _texts() -> Mapping[str, str]:
    """What the source says below each field."""
    groups = {option.group: parse_from_object(option.group).params for option in OPTIONS.values()}
    found = {
        (group, param.arg_name): " ".join((param.description or "").split())
        for group, params in groups.items()
        for param in params
    }
    return {name: found[option.group, name.rpartition(".")[2]] for name, option in OPTIONS.items()}
