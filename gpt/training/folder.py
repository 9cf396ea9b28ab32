"""A run's folder.

runs/NAME/config.yaml       every option, resolved
          checkpoints/      best.ckpt, last.ckpt, and older ones
          metrics.csv       a row per logging interval and validation
          loss.png          the same as a picture
          samples.txt       a text at each validation
          summary.json      how it ended
"""

from pathlib import Path

from gpt.errors import InputError
from gpt.weights.checkpoint import RUNS


def folder_of(name: str) -> Path:
    """`runs/NAME`.

    Raises:
        InputError: the name is no folder's.
    """
    if not name or name.startswith(".") or set(name) & set("/\\"):
        raise InputError(f"expected a plain folder name for --run, got {name!r}")
    return RUNS / name


def new_folder(name: str) -> Path:
    """`runs/NAME`, or the first of `runs/NAME-2`, `runs/NAME-3`, ... that does not exist.

    Raises:
        InputError: the name is no folder's.
    """
    folder, number = folder_of(name), 1
    while folder.exists():
        number += 1
        folder = RUNS / f"{name}-{number}"
    return folder


def folder_of_checkpoint(checkpoint: Path) -> Path | None:
    """The run that a checkpoint belongs to; None for a checkpoint that was moved elsewhere."""
    folder = checkpoint.parents[1] if checkpoint.parent.name == "checkpoints" else checkpoint.parent
    return folder if (folder / "config.yaml").is_file() else None
