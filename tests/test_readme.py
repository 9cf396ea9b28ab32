"""Run every command and every program that the README shows, with shortened training."""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from gpt import GPT, GPTConfig
from gpt.weights.commands import write_export

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(
    r"^```(bash|python)\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S
)

# The `gpt` that the README's commands find: `fit` runs four steps, whatever length it asks for.
SHIM = f"""#!/bin/sh
if [ "$1" = fit ]; then
    set -- "$@" --trainer.max_steps 4 --trainer.val_check_interval 4
fi
exec "{sys.executable}" -m gpt.cli "$@"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A text, a hub cache in which `gpt2` is tiny, and a `gpt` that runs this checkout."""
    folder = tmp_path_factory.mktemp("readme")
    text = "Once upon a time there was a fox.\n" * 400 + (ROOT / "docs" / "benchmarks.md").read_text("utf-8")
    (folder / "my-text.txt").write_text(text, encoding="utf-8")
    rows = (json.dumps({"prompt": f"Say {n}", "completion": f"{n}!"}) + "\n" for n in range(60))
    (folder / "my-examples.jsonl").write_text("".join(rows), encoding="utf-8")
    (folder / "bin").mkdir()
    for name, script in {"gpt": SHIM, "python": f'#!/bin/sh\nexec "{sys.executable}" "$@"\n'}.items():
        (folder / "bin" / name).write_text(script, encoding="utf-8")
        (folder / "bin" / name).chmod(0o755)
    small = GPT(GPTConfig(context_length=256, emb_dim=32, num_heads=2, num_layers=1))
    write_export(small.config, small.state_dict(), folder / "hub" / "models--gpt2" / "snapshots" / "1", "hf")
    (folder / "hub" / "models--gpt2" / "refs").mkdir()
    (folder / "hub" / "models--gpt2" / "refs" / "main").write_text("1", encoding="utf-8")
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "scripts", "configs", "data", "docs"):
        (folder / name).symlink_to(ROOT / name)
    return folder


@pytest.mark.skipif(shutil.which("sh") is None, reason="needs a POSIX shell")
def test_every_block_runs_in_order(folder):
    """One test, because a block uses what the blocks before it wrote."""
    assert len(BLOCKS) >= 6
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment |= {"HF_HUB_CACHE": str(folder / "hub"), "HF_HUB_OFFLINE": "1"}
    for language, block in BLOCKS:
        if "pip install" in block:
            continue  # the machine that runs this test is already set up
        if "git clone" in block and shutil.which("git") and (ROOT / ".git").exists():
            block = block.replace("git clone REPOSITORY", f"git clone --quiet '{ROOT}'")
        elif "git clone" in block:
            continue
        if "curl " in block and (shutil.which("curl") is None or find_spec("uvicorn") is None):
            continue
        block = block.replace("curl ", r"curl --write-out '%{stderr}status %{http_code}\n' ")
        if "make " in block:
            block = re.sub(r"^make ", "make --dry-run ", block, flags=re.M)
        command = ["sh", "-ec", block] if language == "bash" else [sys.executable, "-c", block]
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            check=False,
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=120,
        )
        assert done.returncode == 0, f"{block}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        assert "curl " not in block or "status 200" in done.stderr, done.stdout + done.stderr[-2000:]
    assert (folder / "runs" / "mine" / "summary.json").is_file()
