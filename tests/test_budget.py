"""The count of code tokens: comments and layout are free, a missing file and too many tokens are errors."""

import runpy
from pathlib import Path

import pytest

BUDGET = Path(__file__).parents[1] / "scripts" / "budget.py"


@pytest.fixture
def budget():
    return runpy.run_path(str(BUDGET))


@pytest.fixture
def tree(tmp_path, budget):
    """Every file of the core path, with three tokens."""
    for name in budget["BUDGETS"]["core path"].patterns:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('"""Text."""\n\n# a comment\nx = 1\n', encoding="utf-8")
    return tmp_path


def test_a_small_package_passes_and_both_counts_are_printed(budget, tree, capsys):
    assert budget["main"](tree) == 0
    count = 3 * len(budget["BUDGETS"]["core path"].patterns)
    assert capsys.readouterr().out.split().count(str(count)) == 2


def test_too_many_tokens_fail(budget, tree, capsys):
    (tree / "gpt" / "model.py").write_text("x = 1\n" * 5000, encoding="utf-8")
    assert budget["main"](tree) == 1
    assert capsys.readouterr().out.count("TOO MANY") == 1


def test_a_file_that_moved_is_an_error(budget, tree):
    (tree / "gpt" / "model.py").unlink()
    with pytest.raises(FileNotFoundError, match=r"gpt/model\.py"):
        budget["main"](tree)
