"""The threads that compute on a CPU: each on a core of its own, at rest while others need the cores."""

import ctypes
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

_CHOSEN = {"OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"}
_RANKS = ("WORLD_SIZE", "SLURM_NTASKS")  # how many processes train together, where there are several
_INTERVAL = 0.2  # seconds between two looks at where a thread runs
_BUSY_INTERVAL = 0.5  # seconds between two looks at how busy the cores are
_BUSY, _QUIET = 0.2, 0.05  # seconds, in a second, that threads wait for a core
_this = threading.local()


def spread_threads() -> None:
    """Give each OpenMP thread of the calling thread a core, where there are as many threads as cores.

    Two threads on one core wait for each other in every operation, and a scheduler may leave them there: on a
    virtual machine steps took up to 1.7 times as long (docs/benchmarks.md). The calling thread is moved back
    whenever it is on another's core, but not bound: what it starts would be bound with it. Nothing changes
    where the environment decides, where several processes share the cores or a GPU computes, and where it is
    not Linux with an OpenMP of GNU's interface.
    """
    if _several_processes() or torch.cuda.is_available():
        return
    if sys.platform != "linux" or _CHOSEN & os.environ.keys() or getattr(_this, "spread", False):
        return
    openmp, cores = ctypes.CDLL(None), sorted(os.sched_getaffinity(0))
    if not len(cores) == torch.get_num_threads() > 1 or not hasattr(openmp, "GOMP_parallel"):
        return

    def bind(_: object) -> None:
        if number := openmp.omp_get_thread_num():
            os.sched_setaffinity(0, {cores[number]})

    _this.spread = True  # a program may call several commands, and each call would start another watch
    openmp.GOMP_parallel(ctypes.CFUNCTYPE(None, ctypes.c_void_p)(bind), None, len(cores), 0)
    threading.Thread(target=_watch, args=(threading.get_native_id(), cores), daemon=True).start()


def _watch(thread: int, cores: list[int]) -> None:
    with suppress(OSError):  # the thread has ended
        while not _several_processes():  # Lightning starts the others later
            if core_of(thread) != cores[0]:
                os.sched_setaffinity(thread, {cores[0]})
                os.sched_setaffinity(thread, cores)
            time.sleep(_INTERVAL)


def _several_processes() -> bool:
    return any(os.environ.get(name, "1") != "1" for name in _RANKS)


def core_of(thread: int) -> int:
    """The core on which a thread of this process runs or ran last; OSError for one that has ended."""
    stat = Path(f"/proc/self/task/{thread}/stat").read_text(encoding="utf-8")
    return int(stat.rpartition(")")[2].split()[36])  # field 39 of proc_pid_stat(5)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def sharing_cores() -> Iterator[None]:
    """Let OpenMP's threads sleep while they wait for each other, as long as other programs need the cores.

    By default they spin, which on a busy machine takes the core from the thread that they wait for: small
    steps take ten times as long (docs/benchmarks.md). GNU's OpenMP hardly spins in a process that has more
    OpenMP threads than cores; so while the cores are busy, this keeps teams of threads that sleep. The
    threads that compute, and so the results, stay the same. With another OpenMP nothing changes.
    """
    chosen = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & {*os.environ}
    if sys.platform != "linux" or chosen or torch.get_num_threads() == 1:
        yield
        return
    sharing, ended = Sharing(), threading.Event()

    def watch() -> None:
        while not ended.wait(_BUSY_INTERVAL):
            sharing.look()
        sharing.end()

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


class Sharing:
    """Whether other programs need the cores, and the threads that sleep while they do."""

    def __init__(self) -> None:
        self._waited = seconds_waited()
        self._teams: threading.Event | None = None

    def look(self) -> None:
        """Start or end the teams, by how long threads have waited for a core since the last look."""
        before, self._waited = self._waited, seconds_waited()
        share = (self._waited - before) / _BUSY_INTERVAL
        if self._teams is None and share > _BUSY:
            self._teams = sleeping_teams()
        elif self._teams and share < _QUIET:
            self.end()

    def end(self) -> None:
        """End the teams."""
        if self._teams:
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
