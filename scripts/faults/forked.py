"""Run the `gpt` command in forked processes, one or several that train together.

A fork has everything imported already, so a run takes a second instead of ten. Needs POSIX. Import
`gpt.run.fit` and set torch to one thread before.
"""

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gpt.cli import main as gpt

TIMEOUT = 120.0


@dataclass(frozen=True, kw_only=True)
class Ended:
    """Exit statuses by rank, -9 for a killed process."""

    statuses: list[int]
    errs: list[str]
    """stderr of each."""
    is_late: bool
    """Whether the time was over before all had ended."""

    @property
    def status(self) -> int:
        """The exit status of rank 0."""
        return self.statuses[0]

    @property
    def err(self) -> str:
        """stderr of rank 0."""
        return self.errs[0]


def run(
    folder: Path,
    arguments: list[str],
    *,
    processes: int = 1,
    sabotage: Callable[[int], None] | None = None,
    kill_after: float = TIMEOUT,
    environment: dict[str, str] | None = None,
) -> Ended:
    """Run the command in `folder` and wait; `sabotage(rank)` is called in each process before the command."""
    shared = {**(environment or {}), **(as_torchrun(processes) if processes > 1 else {})}
    running = []
    for rank in range(processes):
        number = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {}
        running.append(_fork(folder, arguments, rank, shared | number, sabotage))
    return _wait(folder, running, kill_after)


def run_beside(folder: Path, commands: list[list[str]], seconds_between: float) -> Ended:
    """Run commands that know nothing of each other, each so long after the one before, and wait."""
    running = []
    for number, command in enumerate(commands):
        running.append(_fork(folder, command, number, {}, None))
        time.sleep(seconds_between)
    return _wait(folder, running, TIMEOUT)


def _wait(folder: Path, started: list[int], seconds: float) -> Ended:
    """Wait for all, which are killed after so many seconds, or once one of them was killed."""
    running, deadline = set(started), time.monotonic() + seconds
    is_late = False
    while running:
        killed = is_late = time.monotonic() > deadline
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                running.remove(pid)
                killed = killed or os.WIFSIGNALED(status)  # a power loss ends all of a machine
        for pid in running if killed else ():
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    statuses = [int(_text(folder / f"status.{number}") or -9) for number in range(len(started))]
    errs = [_text(folder / f"err.{number}") for number in range(len(started))]
    return Ended(statuses=statuses, errs=errs, is_late=is_late)


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""


def _fork(
    folder: Path,
    arguments: list[str],
    rank: int,
    environment: dict[str, str],
    sabotage: Callable[[int], None] | None,
) -> int:
    for name in ("status", "err"):
        (folder / f"{name}.{rank}").unlink(missing_ok=True)
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.chdir(folder)
        os.environ.update(environment)
        for stream, name in ((1, f"out.{rank}"), (2, f"err.{rank}")):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
        if sabotage:
            sabotage(rank)
        status = gpt(arguments)
    except SystemExit as exit_:
        status = exit_.code if isinstance(exit_.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        Path(f"status.{rank}").write_text(str(status), encoding="utf-8")
        os._exit(status)


def as_torchrun(processes: int) -> dict[str, str]:
    """The environment of so many processes of one machine, without the rank of each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "forked",
    }
