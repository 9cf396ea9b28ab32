"""Ctrl-C, SIGTERM and SIGHUP, sent to a process of its own."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_runs import TINY, result

from gpt.cli import main
from gpt.weights.checkpoint import read

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")


def started(log: Path, *options: str, code: str = "pass") -> subprocess.Popen:
    """`gpt fit` in a session of its own, once it has begun to train."""
    program = f"import sys, gpt.cli; {code}; sys.exit(gpt.cli.main(sys.argv[1:]))"
    with log.open("wb") as err:
        process = subprocess.Popen(
            [sys.executable, "-c", program, *TINY, *options],
            stdout=subprocess.DEVNULL,
            stderr=err,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        )
    deadline = time.monotonic() + 60
    while process.poll() is None and not list(Path("runs").glob("*/metrics.csv")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return process


LONG = ["--trainer.max_steps", "100000", "--model.optimizer.schedule", "constant", "--checkpoint_every", "5"]


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_saves_the_step_and_the_run_resumes_from_it(number, status, workplace):
    log = workplace / "log"
    with started(log, *LONG, "--run", "cut", "--data.num_workers", "1") as process:
        os.killpg(process.pid, number)  # as a terminal does: the worker gets it too
        assert process.wait(timeout=30) == status
    said = log.read_text(encoding="utf-8", errors="replace")
    assert "Traceback" not in said
    step = read("runs/cut/checkpoints/last.ckpt")["global_step"]
    assert f"{number.name}: stopped after step {step}, saved in runs/cut/checkpoints/last.ckpt" in said
    assert "continue with 'gpt fit --resume runs/cut'" in said
    end = ["--trainer.max_steps", str(step + 3)]
    assert main(["fit", "--resume", "runs/cut", *end]) == 0
    assert main([*TINY, *LONG, *end, "--run", "whole"]) == 0
    assert result(Path("runs/cut"))[0] == result(Path("runs/whole"))[0]


def test_a_second_ctrl_c_leaves_at_once(workplace):
    slow = "import time, torch; torch.save = lambda *_: time.sleep(60)"
    with started(workplace / "log", *LONG, "--run", "cut", code=slow) as process:
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            time.sleep(0.3)
        assert process.wait(timeout=5) == 130


def test_under_nohup_a_closed_terminal_changes_nothing(workplace):
    ignore = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    with started(workplace / "log", *LONG, "--run", "cut", code=ignore) as process:
        process.send_signal(signal.SIGHUP)
        time.sleep(1.0)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 143


@pytest.mark.parametrize(
    "moment", ["import torch", "import lightning.pytorch", "from gpt.data.module import *"]
)
def test_a_ctrl_c_before_the_first_step_is_no_traceback(moment, workplace):
    """Ctrl-C while the program imports; the signal is sent by the process itself, just after `moment`."""
    program = (
        "import builtins, os, signal, sys\n"
        "real = builtins.__import__\n"
        "def importing(name, *args, **options):\n"
        "    module = real(name, *args, **options)\n"
        f"    if name == {moment.split()[1]!r}: os.kill(os.getpid(), signal.SIGINT)\n"
        "    return module\n"
        "import gpt.cli\n"
        "builtins.__import__ = importing\n"
        "sys.exit(gpt.cli.main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *TINY],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    assert (done.returncode, done.stderr) == (130, "gpt fit: interrupted\n")
    assert not Path("runs").exists()
