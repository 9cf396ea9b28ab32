"""The programs of docs/python.md run, and learn; what the code defines itself has docstrings."""

import os
import re
import shutil
from pathlib import Path

import pytest

from gpt import GPT, GPTConfig

TEXT = (Path(__file__).parents[2] / "docs" / "python.md").read_text("utf-8")
PROGRAMS = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*LeafSpec")
@pytest.mark.parametrize("program", [PROGRAMS[0], PROGRAMS[2]], ids=["token_data", "plain_loop"])
def test_a_program_of_the_docs_trains(program, workplace, text_file):
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


@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "c++")) is None, reason="int8 needs a compiler")
def test_the_program_of_the_docs_writes_with_rounded_weights(workplace, capsys):
    GPT(GPTConfig(context_length=64, emb_dim=32, num_heads=2, num_layers=1)).save_pretrained("runs/mine")
    exec(PROGRAMS[1], {})
    assert len(capsys.readouterr().out) > 40
