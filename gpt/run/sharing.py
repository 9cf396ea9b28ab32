"""Sharing a CPU's cores with other programs."""

import os
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback

_INTERVAL = 0.5  # seconds between two looks at how busy the cores are
_BUSY, _QUIET = 0.2, 0.05  # seconds, in a second, that threads wait for a core


class ShareCores(Callback):
    """Lets OpenMP's threads sleep while they wait for each other, as long as other programs need the cores.

    By default they spin, which on a busy machine takes the core from the thread that they wait for: small
    steps take ten times as long (docs/benchmarks.md). GNU's OpenMP hardly spins in a process that has more
    OpenMP threads than cores; so while the cores are busy, this keeps teams of threads that sleep. The
    threads that compute, and so the results, stay the same. With another OpenMP nothing changes.
    """

    def __init__(self) -> None:
        self._waited = seconds_waited()
        self._teams: threading.Event | None = None
        self._ended = threading.Event()

    def setup(self, *_: Any, **__: Any) -> None:
        chosen = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & {*os.environ}
        if sys.platform == "linux" and not chosen and torch.get_num_threads() > 1:
            threading.Thread(target=self._watch, daemon=True).start()

    def teardown(self, *_: Any, **__: Any) -> None:
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(_INTERVAL):
            self.look()
        if self._teams:
            self._teams.set()

    def look(self) -> None:
        """Start or end the teams, by how long threads have waited for a core since the last look."""
        before, self._waited = self._waited, seconds_waited()
        share = (self._waited - before) / _INTERVAL
        if self._teams is None and share > _BUSY:
            self._teams = sleeping_teams()
        elif self._teams and share < _QUIET:
            self._teams.set()
            self._teams = None


def sleeping_teams() -> threading.Event:
    """Start teams of OpenMP threads, so that there are more threads than cores until the event is set."""
    size, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
    number = max(0, 1 + (cores - size) // (size - 1))
    started, end = threading.Barrier(number + 1), threading.Event()

    def hold() -> None:
        torch.ones(1 << 18).sum()  # large enough to be shared out to a team
        started.wait()
        end.wait()

    for _ in range(number):
        threading.Thread(target=hold, daemon=True).start()
    started.wait()
    return end


def seconds_waited() -> float:
    """How long the threads of this process have been ready to run without a core, in sum."""
    nanoseconds = 0
    for thread in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError):  # it has ended
            nanoseconds += int(thread.read_bytes().split()[1])
    return nanoseconds / 1e9
