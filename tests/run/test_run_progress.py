"""What a run shows of its progress on stderr: the meter's figures and the samples."""

import io
import time
from types import SimpleNamespace

import pytest
import torch

from gpt.run.record import Meter, Samples

BATCH = (torch.zeros(4, 16),)


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
def run(clock):
    """A run of 100 steps, as callbacks see it."""
    trainer = SimpleNamespace(
        global_step=0,
        world_size=1,
        is_global_zero=True,
        loggers=[],
        optimizers=[SimpleNamespace(param_groups=[{"lr": 0.1}])],
        strategy=SimpleNamespace(reduce=lambda mean, reduce_op: mean),
        callback_metrics={"val_loss": 2.5},
    )
    module = SimpleNamespace(
        planned_steps=100,
        device="cpu",
        last_loss=torch.tensor(3.25),
        last_gradient_norm=torch.tensor(1.0),
    )
    return Meter(every=10, show=True), trainer, module


def advance(run, clock, to):
    """Steps of half a second."""
    meter, trainer, module = run
    for step in range(trainer.global_step + 1, to + 1):
        clock[0] += 0.5
        trainer.global_step = step
        meter.on_train_batch_end(trainer, module, None, BATCH)


def test_off_a_terminal_a_line_now_and_then(run, clock, capsys):
    meter, trainer, module = run
    meter.on_train_start(trainer, module)
    advance(run, clock, 10)
    assert capsys.readouterr().err == ""  # the last line is not ten seconds old
    advance(run, clock, 30)
    assert capsys.readouterr().err == "training: 20 of 100 steps, loss 3.250, 128 tokens/s, 40 s left\n"


def test_a_resumed_run_counts_from_its_step_and_a_new_plan_is_followed(run, clock, capsys):
    meter, trainer, module = run
    meter.steps = trainer.global_step = 45
    meter.on_train_start(trainer, module)
    module.planned_steps = 90
    advance(run, clock, 70)
    assert capsys.readouterr().err == "training: 70 of 90 steps, loss 3.250, 128 tokens/s, 10 s left\n"


def test_on_a_terminal_a_bar_with_the_time_left(run, clock, monkeypatch):
    meter, trainer, module = run
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    meter.on_train_start(trainer, module)
    advance(run, clock, 50)
    meter.on_train_end()
    shown = terminal.getvalue()
    assert "50/100" in shown
    assert "loss 3.250, 128 tokens/s" in shown
    assert "left" in shown
    assert shown.rstrip().endswith("\x1b[?25h")  # the cursor is visible again


def test_validation_prints_its_figures_and_a_sample_as_it_is(run, tmp_path, monkeypatch, capsys):
    meter, trainer, module = run
    trainer.datamodule, module.model = SimpleNamespace(tokenizer=None), None
    monkeypatch.setattr("gpt.generation.stream", lambda *_, **__: iter(["Once [bold]", " upon\n"]))
    meter.on_validation_end(trainer)
    Samples(tmp_path, show=True).on_validation_end(trainer, module)
    assert capsys.readouterr().err == "step 0  val_loss 2.5\nOnce [bold] upon\n"


@pytest.mark.parametrize(("show", "first"), [(False, True), (True, False)])
def test_other_processes_show_nothing_nor_does_a_run_that_is_told_so(run, clock, capsys, show, first):
    meter, trainer, module = run
    meter.show, trainer.is_global_zero = show, first
    meter.on_train_start(trainer, module)
    advance(run, clock, 40)
    meter.on_validation_end(trainer)
    assert capsys.readouterr().err == ""
