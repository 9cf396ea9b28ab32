"""Let the threads that compute on a CPU sleep instead of spin while other programs need the cores.

Why: a PyTorch operation on a CPU splits its work among OpenMP's threads, which then wait for each other.
GNU's OpenMP (libgomp), which PyTorch's packages for Linux bring along, lets them wait in a loop ("spin") for
a while before they sleep. That is fast while every thread has a core. If other programs need the cores, a
spinning thread keeps a core from the very thread that it waits for, and small steps take three to ten times
as long.

How: libgomp has no switch for this once it runs, as OMP_WAIT_POLICY and GOMP_SPINCOUNT are read when it is
loaded. But it hardly spins in a process whose OpenMP threads outnumber the cores: see
`gomp_throttled_spin_count_var` in its source. So `sleeping_teams` starts threads that run one parallel
operation each, which gives each of them a team of OpenMP threads, and then sleep. They compute nothing more,
so results stay the same.

When: `share_cores` measures how long the process's threads wait for a core (`/proc/self/task/*/schedstat`).
It starts the teams above `_BUSY` and ends them below `_QUIET`.

To see whether it is at fault: run the command with OMP_NUM_THREADS=1, which switches all of this off, or with
OMP_WAIT_POLICY=passive, which makes OpenMP always sleep and this needless. To see whether it still helps:
docs/log/threads.md says how it was measured. It can go when `torch` no longer links GNU's OpenMP.
"""

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
    """During the block, let OpenMP's threads sleep while they wait for each other, as long as cores are busy.

    Another OpenMP than GNU's waits as before.
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
