"""What a run shows of its progress on stderr: figures and samples."""

import time
from types import SimpleNamespace

import pytest
import torch

from gpt.run.folder import Claim
from gpt.run.options import Options
from gpt.run.record import Record
from gpt.weights.checkpoint import RunPart


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
    head, *rows = (line.split(",") for line in (tmp_path / "metrics.csv").read_text("utf-8").splitlines())
    assert [row[head.index("tokens_per_second")] for row in rows] == ["128", "128"]


def test_the_speed_after_a_resume_is_that_of_the_updates_since(clock, tmp_path):
    """Each has 64 tokens. Before, an update had 16."""
    with Claim() as claim:
        resumed = RunPart(step=10, place=10, total=100)
        record = Record(claim.take(tmp_path), resumed, Options(log_every=10), window=16)
        advance(record, clock, 20)
        record.close("success")
    head, row = (line.split(",") for line in (tmp_path / "metrics.csv").read_text("utf-8").splitlines())
    assert row[head.index("tokens_per_second")] == "128"


def test_validation_prints_its_figures_and_a_sample_as_it_is(record, monkeypatch, capsys):
    pieces = [(0, "Once [bold]"), (0, " upon\n")]
    monkeypatch.setattr("gpt.generation.stream_samples", lambda *_, **__: pieces)
    record.validated({"val_loss": 2.5}, None, SimpleNamespace(tokenizer=None))
    expected = "step 0: held-out loss 2.5; a sample:\n  Once [bold] upon\n"
    assert capsys.readouterr().err == expected
