"""The threads that compute on a CPU, each on a core of its own."""

import ctypes
import os
import sys

import torch

_CHOSEN = {"OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"}


def spread_threads() -> None:
    """Bind each OpenMP thread of the calling thread to a core, where there are as many threads as cores.

    Two threads on one core wait for each other in every operation, and a scheduler may leave them there: on a
    virtual machine a step took 1.7 times as long (docs/benchmarks.md). The calling thread is not bound, so
    what it starts, such as a data worker, may run anywhere. Nothing changes where the environment decides,
    and where it is not Linux with an OpenMP of GNU's interface.
    """
    if sys.platform != "linux" or _CHOSEN & os.environ.keys():
        return
    openmp, cores = ctypes.CDLL(None), sorted(os.sched_getaffinity(0))
    if not len(cores) == torch.get_num_threads() > 1 or not hasattr(openmp, "GOMP_parallel"):
        return

    def bind(_: object) -> None:
        if number := openmp.omp_get_thread_num():
            os.sched_setaffinity(0, {cores[number]})

    openmp.GOMP_parallel(ctypes.CFUNCTYPE(None, ctypes.c_void_p)(bind), None, len(cores), 0)
