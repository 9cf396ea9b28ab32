"""The limits of CPU time and memory that a container or another control group sets for this process.

Only Linux has control groups. Elsewhere, and without a limit, the result is infinity.
"""

import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def cpu_quota(system: Path = Path("/")) -> float:
    """Return the CPU seconds per second that the process may use. `system` is the root of the file system."""
    return min(map(_quota_of, _groups("cpu", system)), default=math.inf)


def free_memory(system: Path = Path("/")) -> float:
    """Return the bytes that the process may still take."""
    return min(map(_free_in, _groups("memory", system)), default=math.inf)


def _groups(controller: str, system: Path) -> Iterator[Path]:
    """Yield the folders of the groups whose limits of this kind hold: the process's own and those above."""
    try:
        lines = (system / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:  # not on Linux
        return
    for line in lines:
        _, controllers, place = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        # Version 2 has one tree of groups and no controllers here; version 1 has a tree for each set of them.
        tree = system / "sys/fs/cgroup" / (controller if controllers else "")
        # In a container the visible tree may begin at its own group.
        group = tree / place.strip("/")
        for folder in (group, *group.parents):
            yield folder
            if folder == tree:
                break


def _quota_of(group: Path) -> float:
    try:
        if (group / "cpu.max").exists():
            quota, period = _text(group / "cpu.max").split()
        else:
            quota = _text(group / "cpu.cfs_quota_us")
            period = _text(group / "cpu.cfs_period_us")
        limit = int(quota) / int(period)
    except (OSError, ValueError):  # there is no such group, or the limit is "max"
        return math.inf
    return limit if limit > 0 else math.inf


def _free_in(group: Path) -> float:
    """Return a group's limit minus what it uses, without the cached files that the system can drop."""
    version_2 = ("memory.max", "memory.current", "inactive_file")
    version_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    limit, usage, cached = version_2 if (group / version_2[0]).exists() else version_1
    with suppress(OSError, ValueError):  # there is no such group, or the limit is "max"
        free = int(_text(group / limit)) - int(_text(group / usage))
        for line in _text(group / "memory.stat").splitlines():
            name, size = line.split()
            if name == cached:
                free += int(size)
        return max(0, free)
    return math.inf


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")
