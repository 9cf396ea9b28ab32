"""The CPU cores that this process may use. It must not import torch, which reads the thread count then."""

import math
import os
from pathlib import Path


def cores(system: Path = Path("/")) -> int:
    """Count the cores that this process may use.

    It is the number of cores that it may run on, or fewer where its CPU time is limited: a container may run
    on every core of a machine but get the time of only one. `system` is the root of the file system.
    """
    return max(1, round(min(_allowed(), _quota(system))))


def limit_threads(system: Path = Path("/")) -> None:
    """Limit torch's threads to the CPU time that a container allows.

    More threads would wait for each other, and small steps would take many times as long. If $OMP_NUM_THREADS
    is set, it is kept.
    """
    if cores(system) < _allowed():
        os.environ.setdefault("OMP_NUM_THREADS", str(cores(system)))


def _allowed() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _quota(system: Path) -> float:
    """Return the CPU seconds per second that the process's control groups allow; inf without a limit."""
    try:
        lines = (system / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:  # not on Linux
        return math.inf
    least = math.inf
    for line in lines:
        _, controllers, place = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        # Version 2 has one tree of groups and no controllers here; version 1 has a tree for each set of them.
        tree = system / "sys/fs/cgroup" / ("cpu" if controllers else "")
        # A limit also holds for all groups below. In a container the visible tree may begin at its own group.
        group = tree / place.strip("/")
        for folder in (group, *group.parents):
            least = min(least, _quota_of(folder))
            if folder == tree:
                break
    return least


def _quota_of(folder: Path) -> float:
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text(encoding="utf-8").split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text(encoding="utf-8")
            period = (folder / "cpu.cfs_period_us").read_text(encoding="utf-8")
        limit = int(quota) / int(period)
    except (OSError, ValueError):  # there is no such group, or the limit is "max"
        return math.inf
    return limit if limit > 0 else math.inf
