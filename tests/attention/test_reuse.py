"""The attention folder in other projects, and what docs/attention.md says about it."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gpt.attention
from gpt.attention import MultiHeadAttention

FOLDER = Path(gpt.attention.__file__).parent
ROOT = Path(__file__).parents[2]


def run(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A package of another name with a copy of the folder and of `errors.py`."""
    shutil.copytree(FOLDER, tmp_path / "mymodel" / "attention", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(FOLDER.parent / "errors.py", tmp_path / "mymodel")
    return tmp_path


@pytest.mark.slow
def test_a_copy_in_another_package_needs_torch_alone(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(copied))
    out = run(
        copied,
        *("-I", "-c"),
        "import sys, torch; before = set(sys.modules); sys.path.insert(0, '.');"
        "import mymodel.attention as a; from mymodel.errors import InputError;"
        "m = a.MultiHeadAttention(4, 4, 8, 0.0, 2); print(tuple(m(torch.zeros(1, 3, 4)).shape));"
        "print(*sorted({n.split('.')[0] for n in set(sys.modules) - before} - sys.stdlib_module_names));"
        "m.new_cache(1, max_length=8)\n"
        "try: m(torch.zeros(1, 9, 4))\n"
        "except InputError as error: print(error)",
    )
    shape, imported, error = out.splitlines()
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


def module() -> MultiHeadAttention:
    return MultiHeadAttention(8, 12, 32, 0.0, 3).eval()


def test_attention_over_a_context_is_exported() -> None:
    layer = MultiHeadAttention(8, 12, 32, 0.0, 3, causal=False).eval()
    x, context = torch.randn(2, 4, 8), torch.randn(2, 9, 8)
    exported = torch.export.export(layer, (x,), {"context": context}).module()
    torch.testing.assert_close(exported(x, context=context), layer(x, context=context))


def test_onnx_agrees(tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    layer, x = module(), torch.randn(2, 10, 8)
    dims = ({0: torch.export.Dim("batch"), 1: torch.export.Dim("tokens", max=32)},)
    torch.onnx.export(layer, (x,), dynamo=True, dynamic_shapes=dims, verbose=False).save(tmp_path / "a.onnx")
    session = runtime.InferenceSession(tmp_path / "a.onnx")
    for given in (x, torch.randn(3, 7, 8)):
        (out,) = session.run(None, {session.get_inputs()[0].name: given.numpy()})
        torch.testing.assert_close(torch.tensor(out), layer(given), atol=1e-5, rtol=0)
