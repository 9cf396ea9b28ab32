"""Run every command and every program that README and docs show, with shortened training.

Blocks that install are left to `make test-install`.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from multiprocessing.connection import Connection, Listener, wait
from multiprocessing.reduction import recv_handle
from pathlib import Path
from threading import Thread

import pytest
from processes import forked

from gpt import GPT, GPTConfig
from gpt.weights.commands import write_export
from gpt.weights.load import Found

ROOT = Path(__file__).parents[1]
INSTALLS = re.compile("pip install|scripts/install.py")
# The Python of docs/: test_training_docs.py, attention/test_reuse.py, which look at what it prints.
PAGES = {ROOT / "README.md": "bash|python", **dict.fromkeys(sorted(ROOT.glob("docs/*.md")), "bash")}
BLOCKS = [
    block
    for page, languages in PAGES.items()
    for block in re.findall(rf"^```({languages})\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)
]

# The `gpt` that the README's commands find: asks the test to fork it, as imports take eight seconds each.
SHIM = f"""#!{sys.executable}
import os, sys
from multiprocessing.connection import Client
from multiprocessing.reduction import send_handle

with Client(os.path.join(os.path.dirname(__file__), "forks")) as server:
    server.send((sys.argv[1:], os.getcwd(), dict(os.environ)))
    for stream in range(3):
        send_handle(server, stream, None)
    sys.exit(server.recv())
"""
# The hub's settings were read when its package was imported, before the fork.
HUB = """
import os
from huggingface_hub import constants

constants.HF_HUB_CACHE, constants.HF_HUB_OFFLINE = os.environ["HF_HUB_CACHE"], True
"""
FOUR_STEPS = ["--trainer.max_steps", "4", "--trainer.val_check_interval", "4"]


def serve(listener: Listener) -> None:
    """Fork a `gpt` for each connection, in which `fit` runs four steps, whatever length it asks for."""
    with suppress(OSError):  # the listener was closed
        while True:
            Thread(target=fork, args=(listener.accept(),), daemon=True).start()


def without_minutes(words: list[str]) -> list[str]:
    """Four steps are no plan: training/test_planning.py runs one whole."""
    if "--minutes" not in words:
        return words
    place = words.index("--minutes")
    return words[:place] + words[place + 2 :]


def fork(client: Connection) -> None:
    with client:
        words, folder, environment = client.recv()
        if words[0] == "fit":
            words = [*without_minutes(words), *FOUR_STEPS]
        streams = {number: recv_handle(client) for number in range(3)}
        with forked(words, code=HUB, streams=streams, folder=folder, environment=environment) as process:
            for stream in streams.values():
                os.close(stream)
            wait([client, process.sentinel])  # the client ends first where it is killed
            if not process.is_alive():
                client.send(process.exitcode)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Iterator[Path]:
    """A text, a hub cache in which `gpt2` is tiny, and a `gpt` that runs this checkout."""
    folder = tmp_path_factory.mktemp("readme")
    pages = [(ROOT / "docs" / name).read_text("utf-8") for name in ("benchmarks.md", "log.md", "design.md")]
    text = "Once upon a time there was a fox.\n" * 400 + "".join(pages)
    (folder / "my-text.txt").write_text(text, encoding="utf-8")
    rows = (json.dumps({"prompt": f"Say {n}", "completion": f"{n}!"}) + "\n" for n in range(60))
    (folder / "my-examples.jsonl").write_text("".join(rows), encoding="utf-8")
    (folder / "bin").mkdir()
    (folder / "bin" / "gpt").write_text(SHIM, encoding="utf-8")
    (folder / "bin" / "gpt").chmod(0o755)
    small = GPT(GPTConfig(context_length=256, emb_dim=32, num_heads=2, num_layers=1))
    hub = folder / "hub" / "models--gpt2"
    write_export(Found("gpt", small.config, small.state_dict()), hub / "snapshots" / "1", "hf")
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text("1", encoding="utf-8")
    (folder / "bin" / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n', encoding="utf-8")
    (folder / "bin" / "python").chmod(0o755)
    folders = ("gpt", "tests", "scripts", "configs", "data", "docs")
    for name in ("Makefile", "pyproject.toml", "constraints.txt", *folders):
        (folder / name).symlink_to(ROOT / name)
    with Listener(str(folder / "bin" / "forks"), family="AF_UNIX") as listener:
        Thread(target=serve, args=(listener,), daemon=True).start()
        yield folder


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a POSIX shell, and forks")
def test_every_block_runs_in_order(folder):
    """One test, because a block uses what the blocks before it wrote."""
    assert len(BLOCKS) >= 6
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment |= {"HF_HUB_CACHE": str(folder / "hub"), "HF_HUB_OFFLINE": "1"}
    for language, block in BLOCKS:
        if (
            INSTALLS.search(block) or "-m pytest" in block
        ):  # the tests in a copy: tests/attention/test_reuse.py
            continue
        if "git clone" in block and shutil.which("git") and (ROOT / ".git").exists():
            block = block.replace("git clone REPOSITORY", f"git clone --quiet '{ROOT}'")
        elif "git clone" in block:
            continue
        if "curl " in block and (shutil.which("curl") is None or find_spec("uvicorn") is None):
            continue
        block = block.replace("curl ", r"curl --write-out '%{stderr}status %{http_code}\n' ")
        if "make " in block:
            block = re.sub(r"^make ", "make --dry-run ", block, flags=re.M)
        if language == "bash":
            done = subprocess.run(
                ["sh", "-ec", block],
                cwd=folder,
                env=environment,
                check=False,
                capture_output=True,
                text=True,
                encoding="utf-8",
                errors="replace",
                timeout=120,
            )
            status, out, err = done.returncode, done.stdout, done.stderr
        else:
            with open(folder / "out", "wb") as file:
                streams = {1: file.fileno(), 2: file.fileno()}
                with forked(code=block, streams=streams, folder=folder, environment=environment) as process:
                    process.join(120)
                    status = process.exitcode
            out, err = (folder / "out").read_text(encoding="utf-8", errors="replace"), ""
        assert status == 0, f"{block}\n{out[-2000:]}\n{err[-2000:]}"
        assert "curl " not in block or "status 200" in err, out + err[-2000:]
    assert (folder / "runs" / "mine" / "summary.json").is_file()
