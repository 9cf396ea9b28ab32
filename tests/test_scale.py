"""docs/cluster.md contains the output of scripts/scale.py, whose formulas agree with torch's own count."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
import scale
import torch
from processes import ROOT
from tiny_runs import TINY
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from gpt import GPT, GPTConfig
from gpt.weights.checkpoint import read


def test_the_document_contains_the_tables():
    assert scale.tables() in (ROOT / "docs" / "cluster.md").read_text("utf-8")


@pytest.mark.parametrize("context", [256, 1024])
def test_operations_per_token_equal_torchs_count(context):
    """Within 3 %: torch also counts the product that attention's kernel repeats in the backward pass."""
    config = GPTConfig(context_length=context)
    with torch.device("meta"):
        model = GPT(config)
        tokens = torch.zeros(2, context, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    counted = counter.get_total_flops() / tokens.numel()
    assert counted == pytest.approx(scale.flops_per_token(config), rel=0.03)


@pytest.mark.slow
def test_the_cluster_script_is_requeued_and_its_run_goes_on(tmp_path, workplace):
    """Its steps with two processes: SIGUSR1 to the job, its requeueing, and the second start."""
    script = re.search(r"```slurm\n(.*?)```", (ROOT / "docs" / "cluster.md").read_text("utf-8"), re.S)[1]
    (tmp_path / "train.sbatch").write_text(script, "utf-8")
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "scontrol").write_text('#!/bin/sh\necho "$@" >> requeued\n', "utf-8")
    torchrun = f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n'
    (commands / "torchrun").write_text(torchrun, "utf-8")
    for command in commands.iterdir():
        command.chmod(0o755)
    more = "--trainer.accumulate_grad_batches 1 --checkpoint_every 99999 --log_every 1"
    options = [*TINY[1:], *f"{more} --snapshot_megabytes 0".split()]
    environment = {**os.environ, "PATH": f"{commands}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    environment |= {"PROCESSES": "2", "SLURM_JOB_ID": "7", "OMP_NUM_THREADS": "1"}
    start = {"env": environment, "stderr": subprocess.PIPE, "encoding": "utf-8", "cwd": tmp_path}
    job = subprocess.Popen(["bash", "train.sbatch", *options, "--trainer.max_steps", "100000"], **start)
    deadline = time.monotonic() + 120
    while not (tmp_path / "runs/big/metrics.csv").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    job.send_signal(signal.SIGUSR1)
    _, err = job.communicate(timeout=120)
    assert "SIGTERM: stopped after step" in err, err
    assert (tmp_path / "requeued").read_text("utf-8") == "requeue 7\n"
    saved = read(tmp_path / "runs/big/checkpoints/last.safetensors").run
    end = str(saved.step + 2)
    command = ["bash", "train.sbatch", *options, "--trainer.max_steps", end]
    again = subprocess.run(command, check=False, timeout=240, **start)
    assert f"resuming runs/big/checkpoints/last.safetensors, after step {saved.step}" in again.stderr
    assert read(tmp_path / "runs/big/checkpoints/last.safetensors").run.step == saved.step + 2
