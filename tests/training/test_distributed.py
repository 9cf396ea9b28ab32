"""Two gloo processes, started by torchrun in a subprocess."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_runs import TINY

from gpt.checkpoint import read
from gpt.cli import main

PLAIN = [
    *TINY,
    *("--model.config.dropout", "0", "--model.optimizer.name", "adamw", "--log_every", "1"),
    *("--trainer.accumulate_grad_batches", "1", "--trainer.val_check_interval", "5"),
    *("--trainer.max_steps", "10", "--checkpoint_every", "5", "--keep_checkpoints", "9"),
]
ONE = [*PLAIN, "--data.batch_size", "36"]
TWO = ["--data.batch_size", "18", "--trainer.devices", "2"]


def torchrun(*arguments: str) -> subprocess.CompletedProcess:
    """`torchrun --nproc_per_node 2 -m gpt.cli -- ARGUMENTS`."""
    return subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"),
            *("--master_port", str(free_port()), "-m", "gpt.cli", "--", *arguments),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        check=False,
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="replace",
        timeout=180,
    )


def free_port() -> int:
    """Asked of a subprocess: sockets are blocked in the tests themselves."""
    code = "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); print(s.getsockname()[1])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    return int(found.stdout)


def losses(run: str) -> list[float]:
    with open(f"runs/{run}/metrics.csv", encoding="utf-8", newline="") as file:
        return [float(row["train_loss"] or row["val_loss"]) for row in csv.DictReader(file)]


def weights(run: str, name: str = "last.ckpt") -> dict[str, torch.Tensor]:
    return read(f"runs/{run}/checkpoints/{name}")["state_dict"]


def assert_same_weights(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    assert one.keys() == two.keys()
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_processes_do_what_one_does_and_go_on_with_each_others_runs(strategy, workplace):
    two = [*PLAIN, *TWO, "--trainer.strategy", strategy]
    assert main([*ONE, "--run", "one"]) == 0
    ended = torchrun(*two, "--run", "two")
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert sorted(os.listdir("runs")) == ["one", "two"]  # the processes agreed on the folder
    assert losses("two") == pytest.approx(losses("one"), rel=1e-5)
    assert len(losses("two")) == 10 + 2
    assert_same_weights(weights("one"), weights("two"))

    ended = torchrun(*two, "--resume", "runs/one/checkpoints/step-5.ckpt", "--run", "one")  # from 1 to 2
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "after step 5" in ended.stderr
    assert_same_weights(weights("two"), weights("one"))
    assert losses("one") == pytest.approx(losses("two"), rel=1e-5)

    one = [*ONE, "--trainer.devices", "1", "--trainer.strategy", "auto"]
    assert main([*one, "--resume", "runs/two/checkpoints/step-5.ckpt"]) == 0  # from 2 to 1
    assert_same_weights(weights("one"), weights("two"))
    assert losses("two") == pytest.approx(losses("one"), rel=1e-5)


def test_a_signal_to_one_process_stops_both_and_they_resume_exactly(workplace):
    """SIGTERM after the fourth step of process 1 alone; dropout on."""
    (workplace / "stopped.py").write_text(
        "import os, signal, sys\n"
        "import gpt.cli\n"
        "from gpt.training.module import LanguageModel\n"
        "step = LanguageModel.training_step\n"
        "def training_step(self, batch, number):\n"
        "    if self.trainer.global_step == 3 and self.trainer.global_rank == 1:\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return step(self, batch, number)\n"
        "LanguageModel.training_step = training_step\n"
        "sys.exit(gpt.cli.main(sys.argv[1:]))\n",
        encoding="utf-8",
    )
    options = [*PLAIN, *TWO, "--model.config.dropout", "0.3", "--trainer.strategy", "ddp"]
    assert torchrun(*options, "--run", "whole").returncode == 0
    port = str(free_port())
    environment = {
        **os.environ,
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
        **{"GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "x", "OMP_NUM_THREADS": "1"},
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "stopped.py", *options, "--run", "cut"],
            env={**environment, "RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for rank in "01"
    ]
    assert [process.wait(timeout=120) for process in processes] == [143, 143]
    assert read("runs/cut/checkpoints/last.ckpt")["global_step"] == 4
    ended = torchrun("fit", "--resume", "auto", "--run", "cut")
    assert ended.returncode == 0, ended.stderr[-2000:]
    for name, weight in weights("whole").items():
        assert torch.equal(weights("cut")[name], weight)
    assert losses("cut") == losses("whole")
