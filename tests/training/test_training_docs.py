"""The programs of docs/training.md run, and learn."""

import re
from pathlib import Path

import pytest

TEXT = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*LeafSpec")
@pytest.mark.parametrize("program", PROGRAMS, ids=["token_data", "own_loaders", "plain_loop"])
def test_a_program_of_the_docs_runs(program, tmp_path, monkeypatch, text_file):
    monkeypatch.chdir(tmp_path)
    text_file.rename("my-text.txt")
    program = program.replace("logger=False", 'logger=False, accelerator="cpu", enable_checkpointing=False')
    names: dict = {}
    exec(program, names)
    if "trainer" in names:
        metrics = names["trainer"].callback_metrics
        assert 0 < metrics["val_loss"] < 7
    else:
        assert names["loss"].item() < 4.5  # ln 100 is 4.6


def test_there_are_three_programs():
    assert len(PROGRAMS) == 3
    assert all(len(program.strip().splitlines()) <= 20 for program in PROGRAMS)
