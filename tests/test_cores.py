"""Cores by what a process may run on and by its control groups, as Linux shows them."""

import os
from pathlib import Path

import pytest

from gpt.cores import cores, limit_threads


@pytest.fixture(autouse=True)
def eight(monkeypatch):
    """A machine on all of whose eight cores the process may run."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)


def system(root: Path, group: str, files: dict[str, str]) -> Path:
    """The files of a machine on which this process is in a group; `files` are below /sys/fs/cgroup."""
    write(root / "proc/self/cgroup", group)
    for name, text in files.items():
        write(root / "sys/fs/cgroup" / name, text)
    return root


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", "utf-8")


@pytest.mark.parametrize("place", ["/", "/docker/0123"])
@pytest.mark.parametrize(
    ("quota", "expected"),
    [("200000 100000", 2), ("50000 100000", 1), ("max 100000", 8), ("1700000 1000000", 2), ("9 1", 8)],
)
def test_version_2(quota, expected, place, tmp_path):
    """In a container the tree begins at its own group, whatever that is called outside."""
    assert cores(system(tmp_path, f"0::{place}", {"cpu.max": quota})) == expected


def test_a_group_above_may_have_less(tmp_path):
    files = {"user/cpu.max": "300000 100000", "user/me/cpu.max": "max 100000"}
    assert cores(system(tmp_path, "0::/user/me", files)) == 3
    assert cores(system(tmp_path, "0::/user", files)) == 3
    assert cores(system(tmp_path, "0::/", files)) == 8


def test_version_1(tmp_path):
    lines = "12:cpuset:/\n4:cpu,cpuacct:/docker/0123\n1:name=systemd:/"
    files = {"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}
    assert cores(system(tmp_path, lines, files)) == 4
    assert cores(system(tmp_path, "12:cpuset:/", files)) == 8
    assert cores(system(tmp_path, lines, {"cpu/cpu.cfs_quota_us": "-1"})) == 8
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
