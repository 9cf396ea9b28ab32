"""scripts/gpu_check.py takes its whole path on the CPU and says what only a GPU can show."""

import json
import os

import pytest
from processes import run_script


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.timeout(300)  # it starts five processes that import everything, and forks twenty
def test_the_dry_run(tmp_path):
    done = run_script("gpu_check.py", "--dry-run", "--json", tmp_path / "report.json")
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    rows = json.loads((tmp_path / "report.json").read_text("utf-8"))["rows"]
    results = {row["case"]: row["result"] for row in rows}
    assert results["synchronisation: muon"] == "needs a GPU"
    assert set(results.values()) == {"ok", "needs a GPU", "needs several GPUs"} and len(results) > 20
    assert results["ddp: two processes share a GPU, muon"] == results["ddp: one process with NCCL"] == "ok"
    assert all(f"| {case} | {result} |" in done.stdout for case, result in results.items())
