"""scripts/gpu_check.py takes its whole path on the CPU and says what only a GPU can show."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "gpu_check.py"
CHECKS = (
    *("precision", "synchronisation", "generation", "resuming", "checkpoint", "strategies", "float16"),
    *("memory", "serving", "training", "sizes"),
)


@pytest.fixture
def script(monkeypatch):
    """The script as a module."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import gpu_check

    yield gpu_check
    for name in [name for name in sys.modules if name.split(".")[0] in ("gpu_check", "benchmarks", "faults")]:
        del sys.modules[name]


def plan_of(script, folder, seconds=600.0, dry=True):
    deadline = time.monotonic() + seconds
    return script.Plan(device="cpu", dry=dry, folder=folder, deadline=deadline)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_the_dry_run(tmp_path):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--dry-run", "--json", str(tmp_path / "report.json")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        encoding="utf-8",
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    rows = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["rows"]
    assert list(dict.fromkeys(row["check"] for row in rows)) == list(CHECKS)
    for row in rows:
        assert f"| {row['check']} | {row['case']} | {row['verdict']} |" in done.stdout
    reasons = {row["not_run"] for row in rows if row["not_run"]}
    assert reasons == {"left out of the dry run", "the detector needs CUDA"}
    ran = {row["check"] for row in rows if row["passed"]}
    assert ran == set(CHECKS) - {"synchronisation"}


def test_no_case_begins_after_the_deadline(script, tmp_path, monkeypatch):
    now = 0.0

    def long(plan):
        nonlocal now
        for case in ("one", "two"):
            now += 100.0
            yield script.Row(case=case, passed=True)

    monkeypatch.setitem(script.CHECKS, "long", long)
    monkeypatch.setattr("time.monotonic", lambda: now)
    rows = script.run_all(plan_of(script, tmp_path, 60.0), ["long", "long"], lambda rows: None)
    assert [row.verdict for row in rows] == ["ok", "not run: out of time", "not run: out of time"]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="process groups")
@pytest.mark.parametrize("last", ["pass", "time.sleep(60)"], ids=["ended", "out of time"])
def test_nothing_is_left_of_a_command(script, tmp_path, monkeypatch, last):
    """Also not of the processes that it starts, as DDP does."""
    monkeypatch.setattr(script, "COMMAND_SECONDS", 2.0)
    child = "import subprocess, time; child = subprocess.Popen(['sleep', '60'])"
    command = [sys.executable, "-c", f"{child}; print(child.pid, file=open('pid', 'w'), flush=True); {last}"]
    with pytest.raises(subprocess.TimeoutExpired):  # where it ended, its child still holds the pipe
        script.run_alone(command, tmp_path, dict(os.environ))
    pid = int((tmp_path / "pid").read_text(encoding="utf-8"))
    deadline = time.monotonic() + 10
    while is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
