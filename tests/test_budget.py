"""The count of code tokens: comments and layout are free, a missing file and too many tokens are errors."""

import runpy
from pathlib import Path

import pytest

BUDGET = Path(__file__).parents[1] / "scripts" / "budget.py"


def test_growth_and_a_file_that_moved_are_noticed(tmp_path, capsys):
    budget = runpy.run_path(str(BUDGET))
    names = budget["BUDGETS"]["core path"].patterns
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('"""Text."""\n\n# a comment\nx = 1\n', encoding="utf-8")
    assert budget["main"](tmp_path) == 0
    assert capsys.readouterr().out.split().count(str(3 * len(names))) == 2
    (tmp_path / "gpt" / "model.py").write_text("x = 1\n" * 5000, encoding="utf-8")
    assert budget["main"](tmp_path) == 1
    (tmp_path / "gpt" / "model.py").unlink()
    with pytest.raises(FileNotFoundError, match=r"gpt/model\.py"):
        budget["main"](tmp_path)
