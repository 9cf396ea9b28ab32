"""The example of another model: it runs, does not use later values, and learns."""

import runpy
import sys
from pathlib import Path

import torch

SCRIPT = Path(__file__).parents[1] / "scripts" / "examples" / "another_model.py"


def test_a_forecast_does_not_depend_on_later_values():
    example = runpy.run_path(str(SCRIPT))
    model = example["Forecaster"]().eval()
    series = example["waves"](2, torch.Generator().manual_seed(0))[:, :-1]
    changed = series.clone()
    changed[:, 20:] += 1.0
    before, after = model(series), model(changed)
    torch.testing.assert_close(
        before[:, :20], after[:, :20], rtol=0, atol=1e-6
    )  # MKL's sums depend on alignment
    assert not torch.allclose(before[:, 20:], after[:, 20:])


def test_a_little_training_beats_the_last_value(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--steps", "80"])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    last, ours = (float(line.split()[-1]) for line in capsys.readouterr().out.splitlines())
    assert ours < 0.8 * last
