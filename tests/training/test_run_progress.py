import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from gpt.training import progress
from gpt.training.progress import RunProgress


@pytest.fixture
def run():
    """A bar, and what it knows of a run of 100 steps."""
    meter = SimpleNamespace(
        steps=0, every=10, train_loss=3.25, tokens_per_second=12345.6, last_validation={"val_loss": 2.5}
    )
    bar = RunProgress(meter, SimpleNamespace(newest="Once [bold] upon"))
    trainer = SimpleNamespace(global_step=0)
    return bar, meter, trainer, SimpleNamespace(planned_steps=100)


def advance(bar, meter, trainer, module, to):
    for step in range(trainer.global_step + 1, to + 1):
        trainer.global_step = step
        if step % meter.every == 0:
            meter.steps = step
        bar.on_train_batch_end(trainer, module, None, None, 0)


def show(bar, terminal):
    bar.console = Console(file=io.StringIO(), force_terminal=terminal, width=100, highlight=False)
    return bar.console.file


def test_off_a_terminal_a_line_now_and_then(run, monkeypatch):
    bar, meter, trainer, module = run
    clock = [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: clock[0])
    out = show(bar, terminal=False)
    bar.on_train_start(trainer, module)
    advance(bar, meter, trainer, module, 10)
    assert out.getvalue() == ""  # the last line is not ten seconds old
    clock[0] = 20.0
    advance(bar, meter, trainer, module, 40)
    assert out.getvalue() == "step 20/100  loss 3.250  12,346 tokens/s  80 s left\n"


def test_on_a_terminal_a_bar_with_the_time_left(run):
    bar, meter, trainer, module = run
    out = show(bar, terminal=True)
    bar.on_train_start(trainer, module)
    advance(bar, meter, trainer, module, 50)
    bar.teardown(trainer, module, "fit")
    shown = out.getvalue()
    assert "50/100" in shown
    assert "loss 3.250  12,346 tokens/s" in shown
    assert "left" in shown


def test_validation_prints_its_figures_and_a_sample_as_it_is(run):
    bar, _, trainer, module = run
    out = show(bar, terminal=False)
    bar.on_validation_end(trainer, module)
    assert out.getvalue() == "step 0  val_loss 2.5\nOnce [bold] upon\n"


def test_other_processes_show_nothing(run):
    bar, meter, trainer, module = run
    out = show(bar, terminal=False)
    bar.disable()
    bar.on_train_start(trainer, module)
    advance(bar, meter, trainer, module, 30)
    bar.on_validation_end(trainer, module)
    assert out.getvalue() == ""
