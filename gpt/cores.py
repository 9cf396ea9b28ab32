"""The cores that this process may use. Without torch, which counts threads when it is imported."""

import math
import os
from pathlib import Path


def cores(system: Path = Path("/")) -> int:
    """Cores that this process may run on, or those whose time it may take where that is less.

    A container may run on every core of a machine and have the time of one. `system` is the root of the file
    system.
    """
    return max(1, round(min(_allowed(), _quota(system))))


def limit_threads(system: Path = Path("/")) -> None:
    """Where a container limits the time of the cores, let torch have as many threads as that allows.

    More would wait for each other, and small steps take many times as long. $OMP_NUM_THREADS goes before.
    """
    if cores(system) < _allowed():
        os.environ.setdefault("OMP_NUM_THREADS", str(cores(system)))


def _allowed() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _quota(system: Path) -> float:
    """Seconds of computing in a second that the process's control groups allow; inf without a limit."""
    try:
        lines = (system / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return math.inf
    least = math.inf
    for line in lines:
        _, controllers, place = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        # Version 2 has one tree of groups, and no names here; version 1 has one for each set of controllers.
        tree = system / "sys/fs/cgroup" / ("cpu" if controllers else "")
        # A limit counts for the groups below it too. In a container the tree may begin at its own group.
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
    except (OSError, ValueError):  # no such group, or "max"
        return math.inf
    return limit if limit > 0 else math.inf
