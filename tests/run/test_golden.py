"""The losses of 60 steps of the quick recipe in float32, on a fixed text, beside those of golden.csv.

A change that moves them says so by writing that file again:

    OMP_NUM_THREADS=1 python tests/run/test_golden.py
"""

import csv
import os
import tempfile
from pathlib import Path

import pytest

from gpt.cli import main

HERE = Path(__file__).parent
COMMAND = """--trainer.accelerator cpu --trainer.precision 32-true --trainer.max_steps 60 --log_every 1
--trainer.val_check_interval 60 --trainer.logger csv --snapshot_megabytes 0 --run golden --data.corpus"""


def losses() -> list[float]:
    """Train in the current folder; return the loss of each step, and of the validation after the last."""
    assert main(["fit", *COMMAND.split(), str(HERE / "golden.txt")]) == 0
    rows = csv.DictReader(Path("runs/golden/metrics.csv").read_text("utf-8").splitlines())
    return [float(row["train_loss"] or row["val_loss"]) for row in rows]


def test_the_quick_recipe_learns_as_it_did(workplace):
    expected = [float(line) for line in (HERE / "golden.csv").read_text("utf-8").split()]
    actual = losses()
    assert len(actual) == len(expected) == 61
    assert actual[:10] == pytest.approx(expected[:10], rel=1e-4)
    assert actual == pytest.approx(expected, rel=2e-3)
    assert actual[-1] < actual[0] - 2


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        text = "\n".join(map(str, losses()))
        (HERE / "golden.csv").write_text(f"{text}\n", "utf-8")
