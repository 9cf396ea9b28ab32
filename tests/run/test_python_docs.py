"""The programs of docs/python.md run, and learn; what the code defines itself has docstrings."""

import re
from pathlib import Path

import pytest

TEXT = (Path(__file__).parents[2] / "docs" / "python.md").read_text("utf-8")
PROGRAMS = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*LeafSpec")
@pytest.mark.parametrize("program", PROGRAMS, ids=["token_data", "plain_loop"])
def test_a_program_of_the_docs_runs(program, tmp_path, monkeypatch, text_file):
    monkeypatch.chdir(tmp_path)
    text_file.rename("my-text.txt")
    program = program.replace("logger=False", "logger=False, enable_checkpointing=False")
    program = program.replace("Trainer(max", 'Trainer(accelerator="cpu", enable_progress_bar=False, max')
    names: dict = {}
    exec(program, names)
    if "trainer" in names:
        metrics = names["trainer"].callback_metrics
        assert 0 < metrics["val_loss"] < 7
    else:
        assert names["loss"].item() < 4.5  # ln 100 is 4.6
