"""What a run shows of its progress on stderr: figures and samples."""

import io
import time
from types import SimpleNamespace

import pytest
import torch

from gpt.run.folder import RunFolder
from gpt.run.record import Record


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test moves by hand."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def run(clock, tmp_path):
    """A run of 100 updates."""
    return Record(RunFolder("r", tmp_path), every=10, show=True)


def advance(run, clock, start, to, total=100):
    """Updates of half a second."""
    for step in range(start + 1, to + 1):
        clock[0] += 0.5
        run.batch(torch.tensor(3.25), 64)
        if run.is_due(step, total):
            run.update(step, total, 3.25, 0.1, 1.0)


def test_off_a_terminal_a_line_now_and_then(run, clock, capsys):
    run.begin(0, 100)
    advance(run, clock, 0, 10)
    assert capsys.readouterr().err == ""  # the last line is not ten seconds old
    advance(run, clock, 10, 30)
    assert capsys.readouterr().err == "training: 20 of 100 steps, loss 3.250, 128 tokens/s, 40 s left\n"


def test_a_resumed_run_counts_from_its_step_and_a_new_plan_is_followed(run, clock, capsys):
    run.begin(45, 100)
    advance(run, clock, 45, 70, total=90)
    assert capsys.readouterr().err == "training: 70 of 90 steps, loss 3.250, 128 tokens/s, 10 s left\n"


def test_on_a_terminal_a_bar_with_the_time_left(run, clock, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    run.begin(0, 100)
    advance(run, clock, 0, 50)
    run.close()
    shown = terminal.getvalue()
    assert "50/100" in shown
    assert "loss 3.250, 128 tokens/s" in shown
    assert "left" in shown
    assert shown.rstrip().endswith("\x1b[?25h")  # the cursor is visible again


def test_validation_prints_its_figures_and_a_sample_as_it_is(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("gpt.generation.stream", lambda *_, **__: iter(["Once [bold]", " upon\n"]))
    run.validated(0, {"val_loss": 2.5})
    run.sample(0, None, SimpleNamespace(tokenizer=None))
    assert capsys.readouterr().err == "step 0  val_loss 2.5\nOnce [bold] upon\n"


@pytest.mark.parametrize(("show", "first"), [(False, True), (True, False)])
def test_other_processes_show_nothing_nor_does_a_run_that_is_told_so(run, clock, capsys, show, first):
    run.show = show
    run.open(["csv"], first, 0)
    run.begin(0, 100)
    advance(run, clock, 0, 40)
    run.validated(40, {"val_loss": 2.5})
    assert capsys.readouterr().err == ""
