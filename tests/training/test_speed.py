"""The measured speed of a machine, and its file in the cache."""

import json
from pathlib import Path

import pytest
import torch

from gpt.training.speed import SPEEDS, speed_key, time_machine

ON_CPU = ("cpu", "32-true")
KNOWN = 3.3e11


@pytest.fixture
def speeds(workplace, monkeypatch) -> Path:
    """The file of speeds in the cache, which has that of this machine."""
    monkeypatch.setenv("GPT_CACHE", str(workplace / "cache"))
    path = workplace / "cache" / SPEEDS
    path.parent.mkdir()
    path.write_text(json.dumps({speed_key(torch.device("cpu"), "32-true"): KNOWN}), "utf-8")
    return path


def test_a_speed_is_kept_for_this_machine_and_version(speeds):
    assert time_machine(*ON_CPU).speed == KNOWN  # nothing was timed
    speeds.write_text("{damaged", "utf-8")
    measured = time_machine(*ON_CPU).speed
    assert 1e8 < measured < 1e15
    kept = speeds.read_text("utf-8")
    if kept != "{damaged":  # no other program took the cores
        assert json.loads(kept) == {speed_key(torch.device("cpu"), "32-true"): measured}
        assert time_machine(*ON_CPU).speed == measured


def test_a_speed_beside_other_programs_is_not_kept(speeds, monkeypatch):
    speeds.unlink()
    monkeypatch.setattr("time.process_time", lambda: 0.0)  # a process that waits for cores all the time
    assert time_machine(*ON_CPU).speed > 0
    assert not speeds.exists()
