"""metrics.csv is always written; the other loggers are chosen by their names."""

import csv
import os
import subprocess
import sys

import pytest

from gpt.cli import main

FAST = [
    *("--data.vocabulary", "null", "--model.config.vocab_size", "300"),
    *("--model.config.context_length", "16"),
    *("--model.config.emb_dim", "32", "--model.config.num_layers", "1", "--model.optimizer.name", "adamw"),
    *("--data.batch_size", "4", "--trainer.max_steps", "4", "--trainer.val_check_interval", "2"),
    *("--trainer.accelerator", "cpu", "--trainer.precision", "32-true", "--log_every", "1", "--run", "r"),
]


@pytest.fixture
def fit(tmp_path, monkeypatch, text_file):
    def run(*options: str) -> list[dict[str, str]]:
        monkeypatch.chdir(tmp_path)
        assert main(["fit", "--data.corpus", str(text_file), *FAST, *options]) == 0
        with open("runs/r/metrics.csv", encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))

    return run


def test_tensorboard_has_the_figures_of_the_csv(fit, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    rows = fit("--trainer.logger", "tensorboard")
    events = EventAccumulator(str(tmp_path / "runs" / "r" / "tensorboard")).Reload()
    for name in ("train_loss", "val_bits_per_byte"):
        drawn = {event.step: event.value for event in events.Scalars(name)}
        written = {int(row["step"]): float(row[name]) for row in rows if row[name]}
        assert drawn == pytest.approx(written, rel=1e-5) and len(drawn) >= 2


@pytest.mark.slow
def test_weights_and_biases_offline(tmp_path, text_file):
    """In a process of its own: Weights & Biases writes its record when the process ends."""
    pytest.importorskip("wandb")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "gpt.cli",
            "fit",
            "--data.corpus",
            text_file,
            *FAST,
            "--trainer.logger",
            "csv,wandb",
        ],
        cwd=tmp_path,
        env={**os.environ, "WANDB_MODE": "offline"},
        check=False,
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stderr
    (record,) = tmp_path.glob("runs/r/wandb/offline-run-*/*.wandb")
    assert b"val_bits_per_byte" in record.read_bytes()
