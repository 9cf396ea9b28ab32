"""scripts/gpu_check.py takes its whole path on the CPU and says what only a GPU can show."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "gpu_check.py"
CHECKS = (
    *("precision", "synchronisation", "quick", "checkpoint", "steps", "kernels", "resuming", "generation"),
    *("sizes", "strategies"),
)


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
    assert reasons == {"left out of the dry run", "the detector needs CUDA", "no --nanogpt DIR"}
    ran = {row["check"] for row in rows if row["passed"]}
    assert ran == set(CHECKS) - {"synchronisation", "steps"}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_without_a_gpu_one_line_names_the_dry_run():
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert "--dry-run" in done.stderr.splitlines()[-1]
