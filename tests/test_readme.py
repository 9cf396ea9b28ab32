"""Run every command and every program that README, docs and the notebook show, with shortened training.

Blocks that install are left to `make test-install`.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from processes import ROOT

from gpt import GPT, GPTConfig
from gpt.cli import COMMANDS
from gpt.weights.commands import write_export
from gpt.weights.load import StoredModel

INSTALLS = re.compile("pip install|scripts/install.py")
# The Python of docs/: test_python_docs.py, attention/test_reuse.py, which look at what it prints.
PAGES = {ROOT / "README.md": "bash|python", **dict.fromkeys(sorted(ROOT.glob("docs/*.md")), "bash")}
BLOCKS = [
    block
    for page, languages in PAGES.items()
    for block in re.findall(rf"^```({languages})\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)
]

# The `gpt` of the README's commands runs this checkout. `fit` and `compare` plan nothing and make four steps,
# and `--trainer.max_steps` asks for one step in 150: more steps stay more steps, as a resumed run needs them.
SHIM = f"""#!{sys.executable}
import sys
from gpt.cli import main

words = sys.argv[1:]
if words[0] == "fit":
    if "--minutes" in words:
        place = words.index("--minutes")
        del words[place : place + 2]
    if "--trainer.max_steps" in words:
        place = words.index("--trainer.max_steps") + 1
        words[place] = str(int(words[place]) // 150)
    else:
        words += ["--trainer.max_steps", "4"]
    words += ["--trainer.val_check_interval", "4"]
if words[0] == "compare":
    words += ["--steps", "4"]
sys.exit(main(words))
"""


def rows(*rows: tuple[str, str]) -> str:
    """Examples as lines of JSON."""
    return "".join(json.dumps({"prompt": prompt, "completion": text}) + "\n" for prompt, text in rows)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A text, a hub cache in which `gpt2` is tiny, and a `gpt`."""
    folder = tmp_path_factory.mktemp("readme")
    docs = ROOT / "docs"
    names = (docs / "benchmarks.md", docs / "design.md", *sorted(docs.glob("log/*.md")))
    pages = "".join(name.read_text("utf-8") for name in names)
    labels = ("positive", "negative")
    files = {
        "my-text.txt": "Once upon a time there was a fox.\n" * 400 + pages,
        "my-examples.jsonl": rows(*((f"Say {n}", f"{n}!") for n in range(60))),
        "reviews.jsonl": rows(*((f"Film {n}", labels[n % 2]) for n in range(60))),
        "bin/gpt": SHIM,
        "bin/python": f'#!/bin/sh\nexec "{sys.executable}" "$@"\n',
        "hub/models--gpt2/refs/main": "1",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, "utf-8")
    for program in (folder / "bin").iterdir():
        program.chmod(0o755)
    small = GPT(GPTConfig(context_length=256, emb_dim=32, num_heads=2, num_layers=1))
    weights = StoredModel("gpt", small.config, small.state_dict())
    write_export(weights, folder / "hub" / "models--gpt2" / "snapshots" / "1", "hf")
    folders = ("gpt", "tests", "scripts", "configs", "data", "docs")
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "lock.txt", *folders):
        (folder / name).symlink_to(ROOT / name)
    return folder


def run(folder: Path, *command: str) -> str:
    """What a command prints on stderr. A program has to print the shapes that stand in its comments."""
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment |= {"HF_HUB_CACHE": str(folder / "hub"), "HF_HUB_OFFLINE": "1"}
    how = {"capture_output": True, "encoding": "utf-8", "timeout": 300}
    done = subprocess.run(command, cwd=folder, env=environment, check=False, **how)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    for comment in re.findall(r"^print\(.*# (.*)$", command[-1], re.M):
        shapes = re.findall(r"\(([\d, ]+)\)", comment)
        assert all(f"torch.Size([{shape}])" in done.stdout for shape in shapes), comment
    return done.stderr


README = (ROOT / "README.md").read_text("utf-8")


def test_the_table_of_commands_has_all():
    table = README.split("## Commands")[1].split("\n\n")[1]
    assert set(re.findall(r"`gpt (\w+)", table)) == set(COMMANDS)


def cannot_run(block: str) -> bool:
    """Whether a block installs, runs the tests (attention/test_reuse.py does) or needs what is not here."""
    if INSTALLS.search(block) or "-m pytest" in block:
        return True
    if "git clone" in block and not (ROOT / ".git").exists():
        return True
    return "curl " in block and (shutil.which("curl") is None or find_spec("uvicorn") is None)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX shell")
def test_every_block_runs_in_order(folder):
    """One test, because a block uses what the blocks before it wrote."""
    assert len(BLOCKS) >= 6
    for language, block in BLOCKS:
        if cannot_run(block):
            continue
        block = block.replace("git clone REPOSITORY", f"git clone --quiet '{ROOT}'")
        block = block.replace("curl ", r"curl --write-out '%{stderr}status %{http_code}\n' ")
        block = re.sub(r"^make ", "make --dry-run ", block, flags=re.M)
        interpreter = ("sh", "-ec") if language == "bash" else (sys.executable, "-c")
        err = run(folder, *interpreter, block)
        assert "curl " not in block or "status 200" in err
    resumed = folder / "runs" / "steps"
    assert (
        json.loads((resumed / "summary.json").read_text("utf-8"))["steps"] == 6
    )  # README resumes it for more
    (holds,) = re.findall(r"`runs/NAME/` holds (.*?) \(", README, re.S)
    names = re.findall(r"`([\w.]+)/?`", holds)
    assert len(names) == 7 and [name for name in names if not (resumed / name).exists()] == []


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Colab has a POSIX shell")
def test_every_cell_of_the_notebook_runs(folder, tmp_path, monkeypatch):
    """All except the first, which clones and installs, and what needs Colab."""
    cells = json.loads((ROOT / "docs" / "colab.ipynb").read_text("utf-8"))["cells"]
    first, *cells = ("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    assert "git clone" in first and "pip install" in first
    for name in ("bin", "docs"):
        (tmp_path / name).symlink_to((folder / name).resolve())
    monkeypatch.chdir(tmp_path)
    names = {"Image": lambda path: Path(path).read_bytes(), "display": lambda *shown: None}
    for cell in cells:
        lines = cell.splitlines()
        for line in lines:
            if line.startswith("!"):
                run(tmp_path, "sh", "-ec", line[1:])
        python = [line for line in lines if not line.startswith(("!", "from IPython"))]
        exec("\n".join(python), names)
    kept = tmp_path / "saved" / "mine"  # which is the Drive on Colab
    assert (kept / "exported" / "model.safetensors").is_file()
