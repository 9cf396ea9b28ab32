"""Cores by what a process may run on and by its control groups, as Linux shows them."""

import os
from pathlib import Path

import pytest

from gpt.cores import cores, limit_threads

VERSION_1 = "12:cpuset:/\n4:cpu,cpuacct:/docker/0123\n1:name=systemd:/"
PERIOD = {"cpu/cpu.cfs_period_us": "100000"}
GROUPS = {"user/cpu.max": "300000 100000", "user/me/cpu.max": "max 100000"}
# The groups of a process, the files of all groups, and the cores that the process may use of eight.
MACHINES = {
    "1.7 cores": ("0::/", {"cpu.max": "1700000 1000000"}, 2),
    "a third of a core": ("0::/", {"cpu.max": "30000 100000"}, 1),
    "no limit": ("0::/", {"cpu.max": "max 100000"}, 8),
    "a container, whose tree begins at its own group": ("0::/docker/0123", {"cpu.max": "200000 100000"}, 2),
    "less in a group above": ("0::/user/me", GROUPS, 3),
    "less in a group below": ("0::/", GROUPS, 8),
    "version 1": (VERSION_1, {"cpu/cpu.cfs_quota_us": "400000", **PERIOD}, 4),
    "version 1 without a limit": (VERSION_1, {"cpu/cpu.cfs_quota_us": "-1", **PERIOD}, 8),
}


@pytest.fixture(autouse=True)
def eight(monkeypatch):
    """A machine on all of whose eight cores the process may run."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)


def system(root: Path, group: str, files: dict[str, str]) -> Path:
    """The files of a machine on which this process is in a group; `files` are below /sys/fs/cgroup."""
    paths = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in {"proc/self/cgroup": group, **paths}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n", "utf-8")
    return root


@pytest.mark.parametrize(("group", "files", "expected"), MACHINES.values(), ids=MACHINES)
def test_cores_are_those_that_the_groups_allow(group, files, expected, tmp_path):
    assert cores(system(tmp_path, group, files)) == expected


def test_another_system_has_no_groups(tmp_path):
    assert cores(tmp_path / "not Linux") == 8


def test_threads_are_those_of_the_quota_unless_their_number_is_set(tmp_path, monkeypatch):
    quota = system(tmp_path / "a", "0::/", {"cpu.max": "100000 100000"})
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    limit_threads(quota)
    assert os.environ["OMP_NUM_THREADS"] == "5"
    monkeypatch.delenv("OMP_NUM_THREADS")
    limit_threads(system(tmp_path / "b", "0::/", {}))
    assert "OMP_NUM_THREADS" not in os.environ
    limit_threads(quota)
    assert os.environ["OMP_NUM_THREADS"] == "1"
