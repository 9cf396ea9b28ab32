"""Check what a checkpoint or a --config names: the file of a stranger makes the program fetch nothing."""

from collections.abc import Set
from pathlib import Path

from gpt.data.find import shipped_corpora
from gpt.errors import InputError
from gpt.plain import shown
from gpt.run.arguments import Values

_NAMES = {"data.corpus", "model.init_from"}
"""The options whose value may be downloaded."""


def check_local(source: str, values: Values, given: Set[str]) -> None:
    """Raise InputError if a file names something to download that the command line does not name.

    `values` are the options in the file `source`, and `given` the names of those on the command line.
    """
    for name in _NAMES & values.keys() - given:
        value = values[name]
        if value is not None and not is_local(value):
            what = f"{name} {shown(value)} is not on this machine"
            how = f"nothing that a file names is fetched: give it yourself, --{name} ..., if you trust it"
            raise InputError(f"{source}: {what}, and {how}")


def is_local(name: str) -> bool:
    """Whether a corpus named in a file is plain data on this machine, or a corpus of the package."""
    if name in shipped_corpora():
        return True
    path = Path(name)
    return "://" not in name and "::" not in name and path.exists() and path.suffix != ".yaml"
