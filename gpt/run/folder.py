"""A run's folder, which belongs to one process group at a time: README.md lists the files.

`.lock` is locked by the process that trains.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from gpt.errors import InputError
from gpt.plain import shown
from gpt.weights.checkpoint import RUNS, run_of


@contextmanager
def opened(new: Path, existing: Path | None) -> Iterator[Path]:
    """The folder `existing`, or else `new` or the first free one of `new-2`, `new-3`, ..., locked.

    One that another process uses is an InputError. The lock is the operating system's: it ends with the
    process.
    """
    folder = existing or _reserve(new)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / ".lock", timeout=0):
            yield folder
    except Timeout:
        what = "in use by another process: wait for its end, or name another --run"
        raise InputError(f"{folder} is {what}") from None


def folder_of(name: str) -> Path:
    """`runs/NAME`; a name that is no folder's raises an InputError."""
    if not name or name.startswith(".") or Path(name).name != name:
        raise InputError(f"expected a plain folder name for --run, got {shown(name)}")
    return RUNS / name


def folder_to_restart(name: str) -> Path:
    """`runs/NAME`; one that holds files of something else than a run raises an InputError."""
    folder = folder_of(name)
    foreign = next(folder.glob("[!.]*"), None)
    if foreign and not is_run(folder):
        raise InputError(f"{folder} holds {foreign.name} and is no run's folder: choose another --run")
    return folder


def folder_of_checkpoint(checkpoint: Path) -> Path | None:
    """The run that a checkpoint belongs to; None for a checkpoint that was moved elsewhere."""
    folder = run_of(checkpoint) or checkpoint.parent
    return folder if is_run(folder) else None


def is_run(folder: Path) -> bool:
    """Whether config.yaml in this folder was written by a run."""
    config = folder / "config.yaml"
    return config.is_file() and b"\ncheckpoint_every:" in config.read_bytes()


def _reserve(first: Path) -> Path:
    """Make the first of `runs/NAME`, `runs/NAME-2`, ... that does not exist, one for each caller."""
    folder = first
    number = 1
    while True:
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
        number += 1
        folder = first.with_name(f"{first.name}-{number}")
