"""The threads that compute on a CPU, each on a core of its own."""

import ctypes
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import torch

_CHOSEN = {"OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"}
_RANKS = ("WORLD_SIZE", "SLURM_NTASKS")  # how many processes train together, where there are several
_INTERVAL = 0.2  # seconds between two looks at where a thread runs
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
