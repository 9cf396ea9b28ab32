"""The CPU cores that this process may use. It must not import torch, which reads the thread count then."""

import os
from pathlib import Path

from gpt.cgroups import cpu_quota


def cores(system: Path = Path("/")) -> int:
    """Count the cores that this process may use.

    It is the number of cores that it may run on, or fewer where its CPU time is limited: a container may run
    on every core of a machine but get the time of only one. `system` is the root of the file system.
    """
    return max(1, round(min(_allowed(), cpu_quota(system))))


def limit_threads(system: Path = Path("/")) -> None:
    """Limit torch's threads to the CPU time that a container allows.

    More threads would wait for each other, and small steps would take many times as long. If $OMP_NUM_THREADS
    is set, it is kept.
    """
    if cores(system) < _allowed():
        os.environ.setdefault("OMP_NUM_THREADS", str(cores(system)))


def _allowed() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
