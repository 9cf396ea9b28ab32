"""Ctrl-C, SIGTERM and SIGHUP, sent to a process of its own."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from processes import forked
from tiny_runs import COMMAND, TINY, checkpoint, gpt, result

from gpt.run.signals import remembered
from gpt.training.guard import Guard

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals"),
]


LONG = "--trainer.max_steps 100000 --model.optimizer.schedule constant --checkpoint_every 5"


@contextmanager
def started(options: str = "", *, stderr: int | None = None, code: str = "") -> Iterator[BaseProcess]:
    """`gpt fit` as the run `cut` in a session of its own, once it has begun to train."""
    words = f"{COMMAND} {LONG} --run cut {options}".split()
    with forked(words, code=code, streams={} if stderr is None else {2: stderr}) as process:
        deadline = time.monotonic() + 60
        while process.is_alive() and not Path("runs/cut/metrics.csv").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield process


def status(process: BaseProcess, timeout: float) -> int | None:
    """The exit status, or None while it runs."""
    process.join(timeout)
    return process.exitcode


@pytest.mark.parametrize(
    ("number", "expected"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGUSR1, 138)],
)
def test_a_signal_saves_the_step_and_the_run_resumes_from_it(number, expected, workplace):
    log = Path("log")
    with log.open("wb") as stderr, started(stderr=stderr.fileno()) as process:
        os.killpg(process.pid, number)  # as a terminal does
        if number in (signal.SIGTERM, signal.SIGUSR1):  # a launcher may repeat them
            os.kill(process.pid, number)
        assert status(process, timeout=30) == expected
    said = log.read_text(encoding="utf-8", errors="replace")
    assert "Traceback" not in said
    step = checkpoint("cut").run.step
    assert f"{number.name}: stopped after step {step}, saved in runs/cut/checkpoints/last.safetensors" in said
    assert "continue with 'gpt fit --resume runs/cut'" in said
    end = f"--trainer.max_steps {step + 3}"
    assert gpt(f"fit --resume runs/cut {end}") == 0
    assert gpt(f"{COMMAND} {LONG} {end} --run whole") == 0
    assert result("cut")[0] == result("whole")[0]


def test_a_ctrl_c_whose_reader_has_gone_saves_the_step(workplace):
    """Its stderr is a pipe whose reader has ended."""
    reader, writer = os.pipe()
    with started(stderr=writer) as process:
        os.close(writer)
        os.close(reader)
        os.kill(process.pid, signal.SIGINT)
        assert status(process, timeout=30) == 130
    saved = checkpoint("cut").run
    assert saved.csv == Path("runs/cut/metrics.csv").stat().st_size  # nothing came after it


def test_a_second_ctrl_c_leaves_at_once(workplace):
    slow = "import time, gpt.run.checkpoint as s; s.write = lambda *_: time.sleep(60)"
    with started("--snapshot_megabytes 0", code=slow) as process:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            os.kill(process.pid, number)
            time.sleep(0.3)
        assert status(process, timeout=5) == 130


def test_the_first_signal_decides_how_a_run_ends():
    """A cluster sends SIGUSR1, and SIGTERM a while later."""
    guard = Guard()
    with remembered(guard):
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGTERM)
    assert guard.asked.signal == signal.SIGUSR1


def test_under_nohup_a_closed_terminal_changes_nothing(workplace):
    ignore = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    with started(code=ignore) as process:
        os.kill(process.pid, signal.SIGHUP)
        assert status(process, timeout=1) is None
        os.kill(process.pid, signal.SIGTERM)
        assert status(process, timeout=60) == 143


@pytest.mark.parametrize("module", ["torch", "lightning.pytorch"])
def test_a_ctrl_c_before_the_first_step_is_no_traceback(module, workplace):
    """Ctrl-C while the program imports; the process sends the signal to itself, just after this module."""
    program = f"""
import builtins, os, signal, sys
real = builtins.__import__
def importing(name, *args, **options):
    module = real(name, *args, **options)
    if name == {module!r}:
        os.kill(os.getpid(), signal.SIGINT)
    return module
for name in [name for name in sys.modules if name.startswith("gpt.")]:
    del sys.modules[name]  # imported again
builtins.__import__ = importing
"""
    log = workplace / "log"
    with log.open("wb") as err, forked(TINY, code=program, streams={2: err.fileno()}) as process:
        assert status(process, timeout=60) == 130
    assert log.read_text("utf-8") == "gpt fit: interrupted\n"
    assert not Path("runs").exists()


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_validation_as_it_ends_training(number, expected, mine):
    """Lightning by itself ends with status 1 or, for SIGTERM, with 0 as if all were well."""
    code = f"""
import os
from gpt.training.module import LanguageModel
score = LanguageModel.validation_step
def signalled(*given):
    os.kill(os.getpid(), {int(number)})
    return score(*given)
LanguageModel.validation_step = signalled
"""
    with forked(["validate", "--ckpt_path", str(mine)], code=code) as process:
        assert status(process, timeout=60) == expected
