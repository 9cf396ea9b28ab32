"""A short form of scripts/two_processes.py, and what it says of a failure; the long one is run by hand."""

import importlib
import json
import os

import pytest
from processes import run_script

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path):
    """In a process of its own, as the tests may open no socket."""
    ended = run_script("two_processes.py", "--short", "--folder", tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("\nok ") == 4
    assert len((tmp_path / "processes.jsonl").read_text(encoding="utf-8").splitlines()) == 4


def test_a_difference_fails_and_is_not_measured_again(tmp_path, monkeypatch, capsys):
    script, measured = importlib.import_module("two_processes"), []

    def measure(case, folder, own_order):
        measured.append(case)
        bad = case.optimizer == "muon" and case.accumulation == 4
        return script.Result(losses=1e-7, weights=2e-5 if bad else 1e-6)

    monkeypatch.setattr(script, "measure", measure)
    assert script.main(["--folder", str(tmp_path), "--only", "strategy='ddp'"]) == 1
    assert len(measured) == 32 + 4  # and the changes
    assert script.main(["--folder", str(tmp_path), "--only", "strategy='ddp'"]) == 1
    assert len(measured) == 36
    table = capsys.readouterr().out
    assert "| ddp, muon, 32-true, accumulation 4 | 4 | 1.0e-07 | 2.0e-05 | 0 of 4 |" in table
    assert "| ddp, muon, 32-true, accumulation 1 | 4 | 1.0e-07 | 1.0e-06 | 4 of 4 |" in table
    rows = [
        json.loads(line) for line in (tmp_path / "processes.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert len(rows) == 36
