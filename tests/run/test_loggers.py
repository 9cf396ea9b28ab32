"""metrics.csv is always written; the other loggers are chosen by their names."""

import os
import subprocess
import sys

import pytest
from tiny_runs import TINY, fit, rows

SHORT = ["--trainer.max_steps", "4", "--trainer.val_check_interval", "2", "--log_every", "1", "--run", "r"]


def test_tensorboard_has_the_figures_of_the_csv(workplace):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert fit(*SHORT, "--trainer.logger", "tensorboard") == 0
    events = EventAccumulator("runs/r/tensorboard").Reload()
    for name in ("train_loss", "val_bits_per_byte"):
        drawn = {event.step: event.value for event in events.Scalars(name)}
        written = {int(row["step"]): float(row[name]) for row in rows("r") if row[name]}
        assert drawn == pytest.approx(written, rel=1e-5) and len(drawn) >= 2


@pytest.mark.slow
def test_weights_and_biases_offline(workplace):
    """In a process of its own: Weights & Biases writes its record when the process ends."""
    pytest.importorskip("wandb")
    command = [sys.executable, "-m", "gpt.cli", *TINY, *SHORT, "--trainer.logger", "csv,wandb"]
    done = subprocess.run(
        command,
        env={**os.environ, "WANDB_MODE": "offline"},
        check=False,
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stderr
    (record,) = workplace.glob("runs/r/wandb/offline-run-*/*.wandb")
    assert b"val_bits_per_byte" in record.read_bytes()
