"""Runs for a time, as `gpt fit --minutes` plans them: resumed exactly, and repeated."""

from pathlib import Path

import pytest
import yaml
from tiny_runs import gpt, killed, result, summary

SMALL = """text.txt --trainer.accelerator cpu --trainer.precision 32-true --log_every 5 --data.batch_size 64
--model.config.emb_dim 32 --model.config.num_layers 1 --model.config.dropout 0.1 --data.vocabulary gpt2:300
--checkpoint_every 10 --keep_checkpoints 99"""


@pytest.mark.slow
def test_a_planned_run_resumes_exactly_and_its_config_repeats_it(workplace, capsys):
    Path("text.txt").write_text("".join(f"{n * n} is the square of {n}.\n" for n in range(9000)), "utf-8")
    assert gpt(f"fit {SMALL} --minutes 20s --run whole") == 0
    assert " bits per byte of held-out text" in capsys.readouterr().err
    steps = summary("whole")["steps"]
    reached = summary("whole")["reached"]
    assert reached["seconds"] < 20.5 and reached["steps"] == steps

    killed(Path("runs/whole"), 10).rename("runs/straight")
    assert gpt("fit --resume runs/straight") == 0
    cut = killed(Path("runs/straight"), 20)
    assert gpt(f"fit --resume {cut}") == 0
    assert result(cut) == result("straight")

    for run in ("whole", "straight"):
        options = yaml.safe_load(Path(f"runs/{run}/config.yaml").read_text("utf-8"))
        assert "minutes" not in options  # else --config could not repeat the run
        assert options["trainer"]["max_steps"] == summary(run)["steps"]
    assert gpt("fit --config runs/whole/config.yaml --run again") == 0
    assert summary("again")["steps"] == steps
