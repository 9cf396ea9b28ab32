"""The walkthrough runs, shows its pictures, and stops where a value is not the chapter's."""

import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "examples" / "attention_walkthrough.py"


def test_all_ten_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--output", str(tmp_path / "pictures")])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    out = capsys.readouterr().out
    assert [line[:3] for line in out.splitlines() if line[:1] == "S"] == [
        f"S{i}".ljust(3) for i in range(1, 11)
    ]
    assert "All values are the chapters'" in out
    names = sorted(path.name for path in (tmp_path / "pictures").iterdir())
    assert names == ["steps.png"]


def test_a_value_that_differs_stops_it(capsys) -> None:
    names = runpy.run_path(str(SCRIPT))
    names["PRINTED"]["S1 scores of token 2"] = "0.9544 1.4950 1.4755 0.8434 0.7070 1.0865"
    with pytest.raises(SystemExit, match="S1 scores of token 2 differ"):
        names["without_weights"]()
    assert "1.4754" in capsys.readouterr().out
