"""scripts/gpu_check.py takes its whole path on the CPU and says what only a GPU can show."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import ROOT, run_script


@pytest.fixture
def script(monkeypatch):
    """The script as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import gpu_check

    yield gpu_check
    for name in [*sys.modules]:
        if name.split(".")[0] in ("gpu_check", "benchmarks", "faults", "scale"):
            del sys.modules[name]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.timeout(300)  # it starts five processes that import everything, and forks twenty
def test_the_dry_run(tmp_path):
    done = run_script("gpu_check.py", "--dry-run", "--json", tmp_path / "report.json")
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    rows = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["rows"]
    results = {row["case"]: row["result"] for row in rows}
    assert results["synchronisation: muon"] == "needs a GPU"
    assert set(results.values()) == {"ok", "needs a GPU", "needs several GPUs"} and len(results) > 20
    assert results["ddp: two processes share a GPU, muon"] == results["ddp: one process with NCCL"] == "ok"
    assert all(f"| {case} | {result} |" in done.stdout for case, result in results.items())


def test_what_is_watched_for_waiting_is_the_update_of_a_run(script, tmp_path, monkeypatch):
    """With the clipping, the guard and the optimizer that `gpt fit` has."""
    (tmp_path / "text.txt").write_text("A fox jumps over the dog.\n" * 400, encoding="utf-8")
    clipped, forbidden = [], []
    clip = script.LanguageModel.configure_gradient_clipping

    def noted(self, *given, **named):
        clipped.append(self.trainer.global_step)
        return clip(self, *given, **named)

    def forbid(forbidden_now):
        forbidden.append(forbidden_now)
        return False

    monkeypatch.setattr(script.LanguageModel, "configure_gradient_clipping", noted)
    monkeypatch.setattr(script, "forbid_waiting", forbid)
    place = script.Place(device="cpu", folder=tmp_path, until=time.monotonic() + 60)
    with pytest.raises(script.Needs, match="a GPU"):
        script.synchronisation(place, "muon")
    assert clipped == list(range(6))
    assert forbidden.count(True) == 2  # before each batch of the third update; the rest are the guard's


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="process groups")
def test_nothing_is_left_of_a_command(script, tmp_path):
    """Also not of the processes that it starts, as DDP does."""
    child = "import subprocess; child = subprocess.Popen(['sleep', '60'])"
    command = [sys.executable, "-c", f"{child}; print(child.pid, file=open('pid', 'w'), flush=True)"]
    with pytest.raises(subprocess.TimeoutExpired):  # where it ended, its child still holds the pipe
        script.run_alone(command, tmp_path, dict(os.environ), seconds=2.0)
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
