"""The changes that people make: docs/design.md names the files of each, and no other needs one.

Each is made in a copy of the package, which then trains ten steps.
"""

import csv
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

ROTATED = '''

def _rotated(x, first):
    """Su et al. 2021: pairs of numbers turn by an angle that grows with the position."""
    half = x.shape[3] // 2
    positions = torch.arange(first, first + x.shape[2], device=x.device)[:, None]
    angles = positions * 10_000.0 ** (-torch.arange(half, device=x.device) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], dim=-1)
'''


@dataclass(frozen=True)
class Change:
    """Texts that stand once in a file, with what takes their place; an empty one stands for the end."""

    file: str
    texts: dict[str, str]
    options: tuple[str, ...] = ()
    column: str = ""
    """A column of metrics.csv, which should end with `value`."""
    value: float = 0.0


CHANGES = {
    "rotary positions": Change(
        "gpt/attention/multi_head.py",
        {
            "        if cache is not None:\n            key, value = cache.update(": (
                "        first = 0 if cache is None else cache.length\n"
                "        query, key = _rotated(query, first), _rotated(key, first)\n"
                "        if cache is not None:\n            key, value = cache.update("
            ),
            "": ROTATED,
        },
    ),
    "another optimizer": Change(
        "gpt/training/optimizers/recipe.py",
        {
            'Literal["muon", "adamw"]': 'Literal["muon", "adamw", "sgd"]',
            '    if config.name == "adamw":\n': (
                '    if config.name == "sgd":\n        return torch.optim.SGD([main, *rest])\n'
                '    if config.name == "adamw":\n'
            ),
        },
        ("--model.optimizer.name", "sgd"),
    ),
    "another schedule": Change(
        "gpt/training/schedule.py",
        {
            '"cosine", "constant"]': '"cosine", "constant", "root"]',
            '    if schedule == "constant":\n': (
                '    if schedule == "root":\n        return float((step + 1) ** -0.5)\n'
                '    if schedule == "constant":\n'
            ),
        },
        ("--model.optimizer.schedule", "root", "--model.optimizer.warmup_steps", "0"),
        "learning_rate",
        5e-3 / 10**0.5,  # of the tenth update
    ),
    "another corpus": Change("data/", {}, ("--data.corpus", "mine")),
    "a new metric": Change(
        "gpt/training/module.py",
        {
            '"val_standard_error")': '"val_standard_error", "val_tokens")',
            "        self.log_dict(metrics)\n": (
                "        self.log_dict({**metrics, 'val_tokens': 7.0 + 0 * tokens.sum()})\n"
            ),
        },
        (),
        "val_tokens",
        7.0,
    ),
}


def named_files() -> dict[str, set[str]]:
    """The table of docs/design.md."""
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    table = text.split("| change | files |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", table, re.M)[1:]
    return {name: set(re.findall(r"`([\w./]+)`", files)) for name, files in rows}


def test_the_table_has_each_change():
    assert named_files() == {name: {change.file} for name, change in CHANGES.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_trains(name, tmp_path):
    change = CHANGES[name]
    for folder in ("gpt", "configs", "data"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    words = "".join(f"Word {n * 7919 % 251} comes after word {n}.\n" for n in range(2000))
    (tmp_path / "text.txt").write_text(words, encoding="utf-8")
    recipe = f"about: a text\ncorpus:\n  files: {tmp_path / 'text.txt'}\n"
    (tmp_path / "data" / "mine.yaml").write_text(recipe, encoding="utf-8")
    for before, after in change.texts.items():
        source = (tmp_path / change.file).read_text(encoding="utf-8")
        assert before == "" or source.count(before) == 1, before
        source = source.replace(before, after) if before else source + after
        (tmp_path / change.file).write_text(source, encoding="utf-8")
    sizes = {"emb_dim": 32, "num_heads": 2, "num_layers": 1, "context_length": 32, "vocab_size": 300}
    command = [sys.executable, "-m", "gpt.cli", "fit", "--data.corpus", "text.txt", "--run", "changed"]
    command += ["--trainer.max_steps", "10", "--log_every", "1", "--snapshot_megabytes", "0"]
    command += [word for key, value in sizes.items() for word in (f"--model.config.{key}", str(value))]
    done = subprocess.run(
        [*command, "--model.optimizer.lr", "5e-3", *change.options],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    with open(tmp_path / "runs/changed/metrics.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    losses = [float(row["train_loss"]) for row in rows if row["train_loss"]]
    assert len(losses) == 10 and losses[-1] < losses[0]
    if change.column:
        values = [float(row[change.column]) for row in rows if row[change.column]]
        assert values[-1] == pytest.approx(change.value)
