"""What is recorded of a run: metrics.csv, figures and samples on stderr, and other loggers by their names."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
import yaml
from tiny_runs import TINY, fit, gpt, rows, summary

from gpt.run import loggers
from gpt.run.folder import Claim
from gpt.run.options import Options
from gpt.run.record import Record
from gpt.training.module import LanguageModel
from gpt.weights.checkpoint import RunPart

SHORT = "--trainer.max_steps 4 --trainer.val_check_interval 2 --log_every 1 --run r"
WANDB = "--trainer.accumulate_grad_batches 1 --trainer.logger wandb"


def test_tensorboard_has_the_figures_of_the_csv(workplace):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert fit(f"{SHORT} --trainer.logger tensorboard") == 0
    options = yaml.safe_load((workplace / "runs/r/tensorboard/hparams.yaml").read_text("utf-8"))
    assert options["trainer"]["max_steps"] == 4
    assert gpt("fit --resume runs/r --trainer.max_steps 6 --trainer.logger tensorboard") == 0
    events = EventAccumulator("runs/r/tensorboard").Reload()
    assert "hp_metric" not in events.Tags()["scalars"]
    for name in ("train_loss", "val_bits_per_byte"):
        drawn = {event.step: event.value for event in events.Scalars(name)}
        written = {int(row["step"]): float(row[name]) for row in rows("r") if row[name]}
        assert drawn == pytest.approx(written, rel=1e-5) and len(drawn) >= 2


@pytest.fixture
def wandb(workplace, monkeypatch) -> list:
    """Takes the place of `WandbLogger`, and notes each one that is made and what it is told."""
    made = []

    class FakeWandb:
        def __init__(self, name, save_dir, id) -> None:
            self.id = id
            self.told = []
            self.options = {}
            self.experiment = self
            made.append(self)

        def log_hyperparams(self, options) -> None:
            self.options = options

        def log_metrics(self, figures, step) -> None: ...

        def finish(self, exit_code) -> None:
            self.told.append(exit_code)

        def finalize(self, status) -> None:
            self.told.append(status)

    monkeypatch.setattr(loggers, "WandbLogger", FakeWandb)
    return made


@pytest.mark.parametrize(
    ("act", "told"),
    [
        pytest.param(lambda: None, ["success", 0], id="succeeds"),
        pytest.param(lambda: {}["broken"], ["failed", 1], id="fails"),
        pytest.param(lambda: signal.raise_signal(signal.SIGTERM), ["aborted", 1], id="is stopped"),
    ],
)
def test_a_logger_is_told_the_options_and_how_the_run_ends(act, told, wandb, monkeypatch):
    def loss(self, batch, original=LanguageModel.loss):
        if self.training and self.step == 2:
            act()
        return original(self, batch)

    monkeypatch.setattr(LanguageModel, "loss", loss)
    with suppress(KeyError, SystemExit):
        fit(SHORT, WANDB)
    assert wandb[0].options["trainer"]["max_steps"] == 4
    assert wandb[0].told == told


def test_a_resumed_run_goes_on_with_the_record_of_its_logger(wandb):
    assert fit(SHORT, WANDB) == 0
    assert gpt("fit --resume runs/r --trainer.max_steps 5 --trainer.logger wandb") == 0
    assert fit(SHORT, WANDB, "--run other") == 0
    first, resumed, other = wandb
    assert first.id == resumed.id != other.id


def test_a_logger_that_cannot_start_leaves_a_finished_run_as_it_is(workplace, monkeypatch, capsys):
    def without_key(*_, **__):
        raise ValueError("No API key configured")

    assert fit(SHORT) == 0
    monkeypatch.setattr(loggers, "WandbLogger", without_key)
    assert gpt("fit --resume runs/r --trainer.max_steps 6 --trainer.logger wandb") == 2
    assert "the logger wandb cannot start: No API key configured" in capsys.readouterr().err
    assert summary("r")["steps"] == 4


def test_a_logger_that_cannot_start_costs_a_rewound_run_no_snapshot(workplace, monkeypatch):
    assert fit(SHORT, "--checkpoint_every 1 --keep_checkpoints 9") == 0
    before = sorted(os.listdir("runs/r/snapshots"))
    monkeypatch.setitem(sys.modules, "wandb", None)
    rewound = "fit --resume runs/r/checkpoints/step-2.safetensors"
    assert gpt(f"{rewound} --trainer.logger wandb") == 2
    assert sorted(os.listdir("runs/r/snapshots")) == before != []


@pytest.mark.slow
def test_weights_and_biases_offline(workplace):
    """In a process of its own: Weights & Biases writes its record when the process ends."""
    pytest.importorskip("wandb")
    command = [sys.executable, "-m", "gpt", *TINY, *SHORT.split(), "--trainer.logger", "csv,wandb"]
    environment = {**os.environ, "WANDB_MODE": "offline"}
    done = subprocess.run(command, env=environment, check=False, stderr=subprocess.PIPE)
    assert done.returncode == 0, done.stderr.decode()
    (file,) = workplace.glob("runs/r/wandb/offline-run-*/*.wandb")
    assert b"val_bits_per_byte" in file.read_bytes()


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test moves by hand."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def record(clock, tmp_path):
    """The record of a run of 100 updates."""
    with Claim() as claim:
        record = Record(claim.take(tmp_path), RunPart(total=100), Options(log_every=10), window=16)
        yield record
        record.close("success")


def advance(record, clock, to):
    """Updates of half a second, of 64 tokens each."""
    while record.run.step < to:
        clock[0] += 0.5
        record.run.step += 1
        record.run.place += 4
        record.add_batch(torch.tensor(3.25))
        if record.is_due():
            record.write_row(3.25, 0.1, 1.0)


def test_the_speed_is_that_of_training(record, clock, tmp_path, capsys):
    """A validation of five seconds, within an interval, does not count."""
    advance(record, clock, 14)
    record.pause()
    clock[0] += 5
    assert record.go_on() == 5
    assert capsys.readouterr().err == ""  # the last line is not ten seconds old
    advance(record, clock, 20)
    assert capsys.readouterr().err == "training: 20 of 100 steps, loss 3.250, 128 tokens/s, 60 s left\n"
    assert [row["tokens_per_second"] for row in rows(tmp_path)] == ["128", "128"]


def test_tokens_are_written_to_the_last_one(record, clock, tmp_path):
    record.run.place = 123_456_789
    advance(record, clock, 10)
    (row,) = rows(tmp_path)
    assert row["tokens"] == str(16 * (123_456_789 + 40)) == str(record.tokens)


def test_the_speed_after_a_resume_is_that_of_the_updates_since(clock, tmp_path):
    """Each has 64 tokens. Before, an update had 16."""
    with Claim() as claim:
        resumed = RunPart(step=10, place=10, total=100)
        record = Record(claim.take(tmp_path), resumed, Options(log_every=10), window=16)
        advance(record, clock, 20)
        record.close("success")
    (row,) = rows(tmp_path)
    assert row["tokens_per_second"] == "128"


def test_validation_prints_its_figures_and_a_sample_as_it_is(record, monkeypatch, capsys):
    pieces = [(0, "Once [bold]"), (0, " upon\n")]
    monkeypatch.setattr("gpt.generation.stream_samples", lambda *_, **__: pieces)
    record.validated({"val_loss": 2.5}, None, SimpleNamespace(tokenizer=None))
    expected = "step 0: held-out loss 2.5; a sample:\n  Once [bold] upon\n"
    assert capsys.readouterr().err == expected
