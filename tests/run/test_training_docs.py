"""The programs of docs/training.md run, and learn; what the code defines itself has docstrings."""

import inspect
import pkgutil
import re
from pathlib import Path

import pytest

import gpt.run
import gpt.training

TEXT = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
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


def test_public_methods_that_no_base_class_defines_have_docstrings():
    """What lint checks elsewhere; here most methods are hooks, which Lightning documents."""
    methods = {}
    rooms = (gpt.training, "gpt.training."), (gpt.run, "gpt.run.")
    names = [found.name for room, prefix in rooms for found in pkgutil.walk_packages(room.__path__, prefix)]
    for module in map(pkgutil.resolve_name, names):
        for _, kind in inspect.getmembers(module, inspect.isclass):
            if kind.__module__ == module.__name__ and not kind.__name__.startswith("_"):
                bases = {name for base in kind.__mro__[1:] for name in vars(base)}
                own = {name: value for name, value in vars(kind).items() if name[0] != "_"}
                methods |= {
                    f"{kind.__qualname__}.{name}": value.__doc__
                    for name, value in own.items()
                    if name not in bases and (inspect.isfunction(value) or isinstance(value, property))
                }
    assert "Guard.passes" in methods and "Record.elapsed" in methods
    assert [name for name, text in methods.items() if not text] == []
