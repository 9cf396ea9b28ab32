"""Run every cell of the notebook, with shortened training: its shell lines in a shell, the rest as Python."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "docs" / "colab.ipynb"
CELLS = [
    "".join(cell["source"])
    for cell in json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    if cell["cell_type"] == "code"
]
SMALL = "--trainer.max_steps 4 --trainer.val_check_interval 4 --model.config.emb_dim 32"


class Shown:
    """Stands in for IPython.display, which the tests do not install."""

    def __init__(self) -> None:
        self.images: list[str] = []

    def display(self, *images: str) -> None:
        """Note what is shown; a picture that is missing is an error, as in a notebook."""
        for image in images:
            assert Path(image).read_bytes().startswith(b"\x89PNG")
        self.images += images


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Colab has a POSIX shell")
def test_every_cell_runs(tmp_path, monkeypatch):
    """The first cell clones and installs: it is replaced by this checkout."""
    assert "git clone" in CELLS[0] and "pip install" in CELLS[0]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    shown = Shown()
    names = {"Image": str, "display": shown.display}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for cell in CELLS[1:]:
        python = []
        for line in cell.splitlines():
            if not line.startswith("!"):
                python.append(line)
                continue
            command = re.sub("^!gpt", f"'{sys.executable}' -m gpt.cli", line)
            if " fit " in command:  # planning takes its minutes
                command, planned = re.subn(r"--minutes \d+", SMALL, command)
                assert planned
            done = subprocess.run(
                command,
                shell=True,
                env=environment,
                check=False,
                capture_output=True,
                encoding="utf-8",
                timeout=600,
            )
            assert done.returncode == 0, f"{line}\n{done.stdout[-1000:]}\n{done.stderr[-2000:]}"
        source = "\n".join(line for line in python if not line.startswith("from IPython"))  # no Colab either
        exec(compile(source, "cell", "exec"), names)
    assert len(shown.images) == 3
    kept = tmp_path / "saved" / "mine"  # which is the Drive on Colab
    assert (kept / "checkpoints" / "last.safetensors").is_file()
    assert (kept / "exported" / "model.safetensors").is_file()
