"""Runs for a time, as `gpt fit --minutes` plans them: resumed exactly, repeated, and on two processes."""

import os
import shutil
import signal
from pathlib import Path

import pytest
import yaml
from tiny_runs import gpt, result, summary

from gpt.training.module import LanguageModel
from gpt.weights.checkpoint import read

SMALL = """text.txt --trainer.accelerator cpu --trainer.precision 32-true --log_every 5 --data.batch_size 64
--model.config.emb_dim 32 --model.config.num_layers 1 --model.config.dropout 0.1 --data.vocabulary gpt2:300"""


@pytest.mark.slow
def test_a_planned_run_resumes_exactly_and_its_config_repeats_it(workplace, monkeypatch, capsys):
    Path("text.txt").write_text("".join(f"{n * n} is the square of {n}.\n" for n in range(9000)), "utf-8")
    kept = "--checkpoint_every 10 --keep_checkpoints 99"
    assert gpt(f"fit {SMALL} {kept} --minutes 20s --run whole") == 0
    assert " bits per byte of held-out text" in capsys.readouterr().err
    steps = summary("whole")["steps"]
    reached = summary("whole")["reached"]
    assert reached["seconds"] < 20.5 and reached["steps"] == steps
    saved = sorted(read(path).run.step for path in Path("runs/whole/checkpoints").glob("step-*"))
    middle = saved[len(saved) // 2]
    for name in ("straight", "cut"):
        shutil.copytree("runs/whole", f"runs/{name}")
    assert gpt(f"fit --resume runs/straight/checkpoints/step-{middle}.safetensors") == 0

    original = LanguageModel.training_step

    def training_step(self, batch, number):
        if self.step == middle + 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, batch, number)

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(LanguageModel, "training_step", training_step)
        gpt(f"fit --resume runs/cut/checkpoints/step-{middle}.safetensors")
    assert ended.value.code == 143
    assert gpt("fit --resume runs/cut") == 0
    assert result("cut") == result("straight")

    options = yaml.safe_load(Path("runs/whole/config.yaml").read_text("utf-8"))
    assert (options["minutes"], options["trainer"]["max_steps"]) == (None, steps)
    assert gpt("fit --config runs/whole/config.yaml --run again") == 0
    assert summary("again")["steps"] == steps
