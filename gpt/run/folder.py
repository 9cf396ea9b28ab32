"""A run's folder, which belongs to one process group at a time: docs/start.md lists the files for its reader.

The training process locks `.lock`. A run writes only into this folder and those below it, and follows no
links that someone has left there: see `gpt.files.Folder`.
"""

import os
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path

from gpt.errors import InputError
from gpt.files import Folder, lock, make_folder
from gpt.plain import plain_name
from gpt.progress import is_first_process, notice
from gpt.weights.runs import CHECKPOINTS, RUNS, SNAPSHOTS, run_of

CONFIG = "config.yaml"
_LOCK = ".lock"


class RunFolder:
    """The folder of a run, locked from construction until `close`.

    The lock is the operating system's and ends with the process. Raises InputError if another process uses
    the folder. Where the file system has no locks, each save still checks that no other process has saved.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with ExitStack() as opened:
            self.top = opened.enter_context(Folder(path))
            try:
                descriptor = self.top.open(_LOCK, os.O_RDWR | os.O_CREAT)
                opened.callback(os.close, descriptor)
                has_locks = lock(descriptor)
            except BlockingIOError:
                what = "in use by another process: wait for its end, or name another --run"
                raise InputError(f"{path} is {what}") from None
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(path / _LOCK)) from error
            self._open = opened.pop_all()
        if not has_locks:
            notice(f"the file system of {path} has no locks: let no second process resume this run meanwhile")

    @cached_property
    def checkpoints(self) -> Folder:
        """The folder of the checkpoints, made if missing."""
        return self._open.enter_context(self.top.below(CHECKPOINTS))

    @cached_property
    def snapshots(self) -> Folder:
        """The folder of the snapshots, made if missing."""
        return self._open.enter_context(self.top.below(SNAPSHOTS))

    def close(self) -> None:
        """Close the folders and release the lock."""
        self._open.close()


class Claim:
    """The one run's folder that this process has locked. Only the first process locks it."""

    def __init__(self) -> None:
        self.folder: RunFolder | None = None

    def __enter__(self) -> "Claim":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def take(self, path: Path) -> RunFolder:
        """Lock the folder at `path`, made if missing; return the held one if it is the same."""
        if self.folder is None:
            make_folder(path)
            self.folder = RunFolder(path)
        elif not os.path.samefile(self.folder.path, path):
            raise InputError(f"{self.folder.path} is resumed: a process cannot use {path} too")
        return self.folder

    def take_existing(self, path: Path | None) -> None:
        """Lock a run's folder before its checkpoints are read, if `path` is one."""
        if path is not None and is_first_process() and is_run(path):
            self.take(path)

    def take_new(self, first: Path) -> RunFolder:
        """Make and lock the first of `runs/NAME`, `runs/NAME-2`, ... that does not exist.

        No two processes get the same.
        """
        folder = first
        number = 1
        make_folder(first.parent)
        while True:
            try:
                folder.mkdir()
            except FileExistsError:
                number += 1
                folder = first.with_name(f"{first.name}-{number}")
            else:
                return self.take(folder)

    def close(self) -> None:
        """Release the folder that is held."""
        if self.folder is not None:
            self.folder.close()
            self.folder = None


def folder_of(name: str) -> Path:
    """Return `runs/NAME`; InputError for a name that cannot be a folder's."""
    return RUNS / plain_name("run", name)


def folder_to_restart(name: str) -> Path:
    """Return `runs/NAME`; InputError if it holds files of anything but a run."""
    folder = folder_of(name)
    foreign = next(folder.glob("[!.]*"), None)
    if foreign and not is_run(folder):
        raise InputError(f"{folder} holds {foreign.name} and is no run's folder: choose another --run")
    return folder


def folder_of_checkpoint(checkpoint: Path) -> Path | None:
    """Return the folder of the run that a checkpoint belongs to; None if the checkpoint was moved away."""
    if checkpoint.parent.parent.name in ("", ".."):  # named from inside the run's folder, without its name
        checkpoint = Path(os.path.abspath(checkpoint))  # which follows no links
    folder = run_of(checkpoint) or checkpoint.parent
    return folder if is_run(folder) else None


def is_run(folder: Path) -> bool:
    """Whether a run wrote the config.yaml in this folder."""
    config = folder / CONFIG
    return config.is_file() and b"\ncheckpoint_every:" in config.read_bytes()
