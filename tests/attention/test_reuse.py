"""The attention folder in other projects, and what docs/attention.md says about it."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import gpt.attention

FOLDER = Path(gpt.attention.__file__).parent
ROOT = Path(__file__).parents[2]


USE = """
import sys, torch
before = set(sys.modules)
sys.path.insert(0, ".")
from mymodel.attention import MultiHeadAttention
from mymodel.errors import InputError

module = MultiHeadAttention(4, 4, 8, 0.0, 2)
print(tuple(module(torch.zeros(1, 3, 4)).shape))
module.new_cache(1, max_length=8)
print(*{name.partition(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names)
try:
    module(torch.zeros(1, 9, 4))
except InputError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_copy_in_another_package_needs_torch_alone(tmp_path: Path) -> None:
    """A package of another name with the folder and `errors.py`, used where this package is not found."""
    shutil.copytree(FOLDER, tmp_path / "mymodel" / "attention", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(FOLDER.parent / "errors.py", tmp_path / "mymodel")

    done = subprocess.run(
        [sys.executable, "-I", "-c", USE], cwd=tmp_path, capture_output=True, encoding="utf-8", check=False
    )

    assert done.returncode == 0, done.stderr
    shape, imported, error = done.stdout.splitlines()
    assert shape == "(1, 3, 4)"
    assert set(imported.split()) - {"torch"} == {"mymodel"}
    assert error == "expected at most context_length 8 tokens, got 9"


def blocks(language: str) -> list[str]:
    text = (ROOT / "docs" / "attention.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)


@pytest.mark.skipif(not (ROOT / "docs" / "attention.md").is_file(), reason="a copy without the docs")
def test_the_programs_of_the_docs_run(capsys: pytest.CaptureFixture[str]) -> None:
    for block in blocks("python"):
        exec(compile(block, "docs/attention.md", "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    assert printed == ["torch.Size([2, 10, 64])"] * 2 + ["True"]
