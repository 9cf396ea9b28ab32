"""The measured speed of a machine, and its file in the cache."""

import json
import time
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


@pytest.mark.parametrize("damaged", ["null", "1e400"])
def test_a_damaged_speed_is_measured_again(damaged, speeds):
    key = json.dumps(speed_key(torch.device("cpu"), "32-true"))
    speeds.write_text(f"{{{key}: {damaged}}}", "utf-8")
    assert 1e8 < time_machine(*ON_CPU).speed < 1e15


def test_a_known_speed_is_not_measured_again(speeds):
    assert time_machine(*ON_CPU).speed == KNOWN


@pytest.mark.parametrize(
    ("process_time", "is_kept"),
    [
        pytest.param(time.perf_counter, True, id="alone"),
        pytest.param(lambda: 0.0, False, id="waiting for cores all the time"),
    ],
)
def test_a_speed_is_kept_unless_other_programs_took_the_cores(process_time, is_kept, speeds, monkeypatch):
    speeds.write_text("{damaged", "utf-8")
    monkeypatch.setattr("time.process_time", process_time)
    measured = time_machine(*ON_CPU).speed
    assert 1e8 < measured < 1e15
    if is_kept:
        assert json.loads(speeds.read_text("utf-8")) == {speed_key(torch.device("cpu"), "32-true"): measured}
    else:
        assert speeds.read_text("utf-8") == "{damaged"
