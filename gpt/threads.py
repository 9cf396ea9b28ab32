"""Let the threads that compute on a CPU sleep instead of spin while other programs need the cores."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from gpt.cores import cores

_INTERVAL = 0.5  # seconds between two measurements of how busy the cores are
# Seconds per second that threads wait for a core.
_BUSY = 0.2
_QUIET = 0.05


@contextmanager
def sharing_cores() -> Iterator[None]:
    """Let OpenMP's threads sleep while they wait for each other, as long as cores are busy.

    By default they spin. If other programs need the cores, or the scheduler has put two threads on one core,
    a spinning thread takes the core from the thread that it waits for: small steps then take three to ten
    times as long (docs/log/threads.md). GNU's OpenMP hardly spins in a process that has more OpenMP threads
    than cores. So while cores are busy, this function keeps extra teams of sleeping threads. The threads that
    compute, and so the results, stay the same. With another OpenMP nothing changes.
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
    """Start and end the teams by how long threads have waited for a core since the last measurement."""
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
    """Start sleeping OpenMP teams, so that threads outnumber cores; set the returned event to end them."""
    size = torch.get_num_threads()
    number = max(0, 1 + (cores() - size) // (size - 1))
    started = threading.Barrier(number + 1)
    end = threading.Event()

    def hold() -> None:
        torch.ones(1 << 18).sum()  # large enough to run on a team of threads
        started.wait()
        end.wait()

    for _ in range(number):
        threading.Thread(target=hold, daemon=True).start()
    started.wait()
    return end


def seconds_waited() -> float:
    """Return the seconds that this process's threads have waited for a core, summed over the threads."""
    nanoseconds = 0
    for thread in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError):  # the thread has ended
            nanoseconds += int(thread.read_bytes().split()[1])
    return nanoseconds / 1e9
