"""The threads that compute on a CPU: at rest while others need the cores."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from gpt.cores import cores

_INTERVAL = 0.5  # seconds between two looks at how busy the cores are
# Seconds, in a second, that threads wait for a core.
_BUSY = 0.2
_QUIET = 0.05


@contextmanager
def sharing_cores() -> Iterator[None]:
    """Let OpenMP's threads sleep while they wait for each other, as long as they also wait for cores.

    By default they spin, which takes the core from the thread that they wait for where other programs need
    the cores, or the scheduler has left two threads on one: small steps take three to ten times as long
    (docs/log/threads.md). GNU's OpenMP hardly spins in a process that has more OpenMP threads than cores; so
    while the cores are busy, this keeps teams of threads that sleep. The threads that compute, and so the
    results, stay the same. With another OpenMP nothing changes.
    """
    if sys.platform != "linux" or torch.get_num_threads() == 1:
        yield
        return
    ended = threading.Event()
    threading.Thread(target=share_cores, args=(ended,), daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def share_cores(ended: threading.Event) -> None:
    """Start and end the teams, by how long threads have waited for a core since the last look."""
    waited = seconds_waited()
    teams = None
    while not ended.wait(_INTERVAL):
        before = waited
        waited = seconds_waited()
        share = (waited - before) / _INTERVAL
        if teams is None and share > _BUSY:
            teams = sleeping_teams()
        elif teams and share < _QUIET:
            teams.set()
            teams = None
    if teams:
        teams.set()


def sleeping_teams() -> threading.Event:
    """Start teams of OpenMP threads, so that there are more threads than cores until the event is set."""
    size = torch.get_num_threads()
    number = max(0, 1 + (cores() - size) // (size - 1))
    started = threading.Barrier(number + 1)
    end = threading.Event()

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
