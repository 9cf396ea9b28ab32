"""scripts/gpu_check.py takes its whole path on the CPU and says what only a GPU can show."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "gpu_check.py"


@pytest.fixture
def script(monkeypatch):
    """The script as a module."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import gpu_check

    yield gpu_check
    for name in [
        name for name in sys.modules if name.split(".")[0] in ("gpu_check", "benchmarks", "faults", "scale")
    ]:
        del sys.modules[name]


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
    results = {row["case"]: row["result"] for row in rows}
    assert results["synchronisation: muon"] == "needs a GPU"
    assert set(results.values()) == {"ok", "needs a GPU"} and len(results) > 20
    assert all(f"| {case} | {result} |" in done.stdout for case, result in results.items())


def test_what_is_not_reached_fails(script, tmp_path, monkeypatch, capsys):
    """Neither does a case begin after the deadline, nor a command that could not have its time."""
    ran = []
    cases = {"a: one": lambda place: ran.append("one") or {}, "a: two": lambda place: place.gpt("fit")}
    monkeypatch.setattr(script, "CASES", cases)
    monkeypatch.setattr(script.signal, "signal", lambda *_: None)
    monkeypatch.setenv("GPT_CACHE", str(tmp_path))  # which the script sets
    for minutes in ("0", "1"):
        monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--dry-run", "--minutes", minutes])
        assert script.main() == 1
    assert ran == ["one"]
    out = capsys.readouterr().out
    assert out.count("FAILED: not reached in time") == 3 and out.count("| a: one | ok |") == 1


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="process groups")
def test_nothing_is_left_of_a_command(script, tmp_path, monkeypatch):
    """Also not of the processes that it starts, as DDP does."""
    monkeypatch.setattr(script, "COMMAND_SECONDS", 2.0)
    child = "import subprocess; child = subprocess.Popen(['sleep', '60'])"
    command = [sys.executable, "-c", f"{child}; print(child.pid, file=open('pid', 'w'), flush=True)"]
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
