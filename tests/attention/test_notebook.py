"""The notebook of docs/attention.md runs from top to bottom, and shows what it says."""

import json
from pathlib import Path

import matplotlib as mpl
import pytest
import torch

NOTEBOOK = Path(__file__).parents[2] / "docs" / "attention.ipynb"


@pytest.mark.slow
def test_every_cell_runs(monkeypatch, capsys):
    mpl.use("agg")
    shown = []
    monkeypatch.setattr("matplotlib.pyplot.show", lambda: shown.append(1))
    names: dict[str, object] = {}
    for cell in json.loads(NOTEBOOK.read_text("utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    out = capsys.readouterr().out
    assert "torch.Size([1, 6, 4]) torch.Size([1, 2, 6, 6])" in out
    assert len(shown) == 3
    weights = names["weights"]
    assert isinstance(weights, torch.Tensor)
    assert weights.triu(1).count_nonzero() == 0  # no word sees the words after it
