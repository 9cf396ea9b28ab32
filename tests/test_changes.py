"""The changes that people make: docs/design.md names the files of each, and no other needs one.

Each is made in a copy of the package, which then trains ten steps.
"""

import csv
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
Rows = list[dict[str, str]]

ROTATED = '''

def _rotated(x, first):
    """Su et al. 2021: pairs of numbers turn by an angle that grows with the position."""
    half = x.shape[3] // 2
    positions = torch.arange(first, first + x.shape[2], device=x.device)[:, None]
    angles = positions * 10_000.0 ** (-torch.arange(half, device=x.device) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], dim=-1)
'''


def replaced(file: str, *changes: tuple[str, str]) -> Callable[[Path], None]:
    """Replace texts that stand once in a file; an empty one stands for the end."""

    def change(copy: Path) -> None:
        path = copy / file
        source = path.read_text(encoding="utf-8")
        for before, after in changes:
            assert before == "" or source.count(before) == 1, before
            source = source.replace(before, after) if before else source + after
        path.write_text(source, encoding="utf-8")

    return change


def new_corpus(copy: Path) -> None:
    recipe = f"about: a text\ncorpus:\n  files: {copy / 'text.txt'}\n"
    (copy / "data" / "mine.yaml").write_text(recipe, encoding="utf-8")


CHANGES: dict[str, tuple[set[str], list[Callable[[Path], None]], list[str], Callable[[Rows], bool]]] = {
    "rotary positions": (
        {"gpt/attention/multi_head.py"},
        [
            replaced(
                "gpt/attention/multi_head.py",
                (
                    "        if cache is not None:\n            key, value = cache.update(",
                    "        first = 0 if cache is None else cache.length\n"
                    "        query, key = _rotated(query, first), _rotated(key, first)\n"
                    "        if cache is not None:\n            key, value = cache.update(",
                ),
                ("", ROTATED),
            )
        ],
        [],
        lambda rows: True,
    ),
    "another optimizer": (
        {"gpt/training/optimizers/recipe.py"},
        [
            replaced(
                "gpt/training/optimizers/recipe.py",
                ('Literal["muon", "adamw"]', 'Literal["muon", "adamw", "sgd"]'),
                (
                    '    if config.name == "adamw":\n',
                    '    if config.name == "sgd":\n        return torch.optim.SGD([main, *rest])\n'
                    '    if config.name == "adamw":\n',
                ),
            )
        ],
        ["--model.optimizer.name", "sgd"],
        lambda rows: True,
    ),
    "another schedule": (
        {"gpt/training/schedule.py"},
        [
            replaced(
                "gpt/training/schedule.py",
                ('"cosine", "constant"]', '"cosine", "constant", "root"]'),
                (
                    '    if schedule == "constant":\n',
                    '    if schedule == "root":\n        return float((step + 1) ** -0.5)\n'
                    '    if schedule == "constant":\n',
                ),
            )
        ],
        ["--model.optimizer.schedule", "root", "--model.optimizer.warmup_steps", "0"],
        lambda rows: math.isclose(float(rows[4]["learning_rate"]), 5e-3 / math.sqrt(6), rel_tol=1e-6),
    ),
    "another corpus": ({"data/"}, [new_corpus], ["--data.corpus", "mine"], lambda rows: True),
    "a new metric": (
        {"gpt/training/module.py"},
        [
            replaced(
                "gpt/training/module.py",
                ('"val_standard_error")', '"val_standard_error", "val_tokens")'),
                (
                    "        self.log_dict(metrics)\n",
                    "        self.log_dict({**metrics, 'val_tokens': tokens.sum()})\n",
                ),
            )
        ],
        [],
        lambda rows: float(rows[-1]["val_tokens"]) > 100,
    ),
}


def named_files() -> dict[str, set[str]]:
    """The table of docs/design.md."""
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    table = text.split("| change | files |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", table, re.M)[1:]
    return {name: set(re.findall(r"`([\w./]+)`", files)) for name, files in rows}


def test_the_table_has_each_change():
    assert named_files() == {name: files for name, (files, *_) in CHANGES.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_trains(name, tmp_path):
    _, edits, options, holds = CHANGES[name]
    for folder in ("gpt", "configs", "data"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    words = "".join(f"Word {n * 7919 % 251} comes after word {n}.\n" for n in range(2000))
    (tmp_path / "text.txt").write_text(words, encoding="utf-8")
    for edit in edits:
        edit(tmp_path)
    sizes = {"emb_dim": 32, "num_heads": 2, "num_layers": 1, "context_length": 32, "vocab_size": 300}
    command = [sys.executable, "-m", "gpt.cli", "fit", "--data.corpus", "text.txt", "--run", "changed"]
    command += ["--trainer.max_steps", "10", "--log_every", "1", "--snapshot_megabytes", "0"]
    command += [word for key, value in sizes.items() for word in (f"--model.config.{key}", str(value))]
    done = subprocess.run(
        [*command, "--model.optimizer.lr", "5e-3", *options],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "runs/changed/summary.json").read_text(encoding="utf-8"))
    assert summary["steps"] == 10
    with open(tmp_path / "runs/changed/metrics.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    losses = [float(row["train_loss"]) for row in rows if row["train_loss"]]
    assert losses[-1] < losses[0]
    assert holds(rows)
