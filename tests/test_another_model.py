"""The example of another model: it runs, does not use later values, and learns."""

import runpy
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[1] / "scripts" / "examples" / "another_model.py"


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(SCRIPT))


def test_a_forecast_does_not_depend_on_later_values(example):
    model = example["Forecaster"]().eval()
    series = example["waves"](2, torch.Generator().manual_seed(0))[:, :-1]
    changed = series.clone()
    changed[:, 20:] += 1.0
    before, after = model(series), model(changed)
    torch.testing.assert_close(
        before[:, :20], after[:, :20], rtol=0, atol=1e-6
    )  # MKL's sums depend on alignment
    assert not torch.allclose(before[:, 20:], after[:, 20:])


def test_a_little_training_beats_the_last_value(example):
    found = example["errors"](example["train"](80))
    assert found["the model"] < 0.8 * found["the last value"]


def test_the_script_prints_its_comparison(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--steps", "2"])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert [line[:10] for line in lines] == ["the last v", "the model "]
