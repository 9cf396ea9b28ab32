"""A run's folder, which belongs to one process group at a time: README.md lists the files.

`.lock` is locked by the process that trains, and `.holder` says which that is.
"""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from gpt.errors import InputError
from gpt.files import write_json
from gpt.plain import parse_yaml
from gpt.weights.checkpoint import RUNS, run_of

_OURS = {"model", "data", "trainer", "checkpoint_every"}  # groups and options of every config.yaml of a run
_SECONDS_FOR_WORKERS = 10.0  # a killed process's data workers hold its lock until they notice


@contextmanager
def opened(new: Path, existing: Path | None) -> Iterator[Path]:
    """The folder `existing`, or else `new` or the first free one of `new-2`, `new-3`, ..., locked.

    One that another process uses is an InputError. The lock is the operating system's: it ends with the
    process.
    """
    folder = existing or _reserve(new)
    folder.mkdir(parents=True, exist_ok=True)
    lock, holder = FileLock(folder / ".lock"), _holder(folder)
    try:
        lock.acquire(timeout=_SECONDS_FOR_WORKERS if _is_dead(holder) else 0)
    except Timeout:
        who = "process {pid} on {host} since {since}".format(**holder) if holder else "another process"
        raise InputError(f"{folder} is in use by {who}: wait for its end, or name another --run") from None
    since = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    try:
        write_json(folder / ".holder", {"pid": os.getpid(), "host": socket.gethostname(), "since": since})
        yield folder
    finally:
        (folder / ".holder").unlink(missing_ok=True)
        lock.release()


def folder_of(name: str) -> Path:
    """`runs/NAME`; a name that is no folder's raises an InputError."""
    if not name or name.startswith(".") or set(name) & set("/\\") or not name.isprintable():
        raise InputError(f"expected a plain folder name for --run, got {name!r}")
    return RUNS / name


def folder_to_restart(name: str) -> Path:
    """`runs/NAME`; one that holds files of something else than a run raises an InputError."""
    folder = folder_of(name)
    foreign = [path for path in folder.glob("*") if not path.name.startswith(".")]
    if foreign and not is_run(folder):
        raise InputError(f"{folder} holds {foreign[0].name} and is no run's folder: choose another --run")
    return folder


def folder_of_checkpoint(checkpoint: Path) -> Path | None:
    """The run that a checkpoint belongs to; None for a checkpoint that was moved elsewhere."""
    folder = run_of(checkpoint) or checkpoint.parent
    return folder if is_run(folder) else None


def is_run(folder: Path) -> bool:
    """Whether config.yaml in this folder was written by a run."""
    try:
        values = parse_yaml((folder / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(values, dict) and set(values) >= _OURS


def _reserve(first: Path) -> Path:
    """Make the first of `runs/NAME`, `runs/NAME-2`, ... that does not exist, one for each caller."""
    first.parent.mkdir(parents=True, exist_ok=True)
    names = (first.name if number == 1 else f"{first.name}-{number}" for number in count(1))
    for folder in map(first.with_name, names):
        with suppress(FileExistsError):
            folder.mkdir()
            break
    return folder


def _holder(folder: Path) -> dict[str, Any]:
    """Who holds the lock, as far as the holder has written it."""
    try:
        holder = json.loads((folder / ".holder").read_text(encoding="utf-8"))
        return {name: holder[name] for name in ("pid", "host", "since")}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _is_dead(holder: dict[str, Any]) -> bool:
    """Whether the process that wrote `.holder` ended on this machine without removing it."""
    if os.name != "nt" and holder.get("host") == socket.gethostname():
        try:
            os.kill(int(holder["pid"]), 0)
        except (OSError, ValueError) as error:
            return isinstance(error, ProcessLookupError)
    return False
