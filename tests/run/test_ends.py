"""A run ends where its limits say, its learning rate decayed and its last step validated."""

import json
from pathlib import Path

import pytest
from tiny_runs import fit, result, rows

from gpt.cli import main
from gpt.training import compilation
from gpt.training.module import LanguageModel
from gpt.weights.checkpoint import read

ADAMW = ["--model.optimizer.name", "adamw", "--model.optimizer.warmup_steps", "0"]
NO_STEPS = ["--trainer.max_steps", "-1"]


@pytest.mark.parametrize(
    ("options", "steps", "reason"),
    [
        (["--trainer.max_epochs", "2"], 18, "max_epochs 2 of 9 steps"),
        (["--trainer.max_epochs", "4"], 20, "max_steps 20"),
        (["--trainer.max_steps", "7", "--trainer.max_time", "00:10:00:00"], 7, "max_steps 7"),
        (["--trainer.max_steps", "1"], 1, "max_steps 1"),
    ],
)
def test_the_first_limit_is_planned_for_and_named(options, steps, reason, workplace, capsys):
    """An epoch of this text is 9 updates of 2 x 37 windows."""
    linear = ["--model.optimizer.schedule", "linear", "--log_every", "1"]
    assert fit(*ADAMW, *linear, *options, "--run", "r") == 0
    err = capsys.readouterr().err
    assert f"planned: {steps} steps ({reason}" in err
    assert ("whichever comes first" in err) == ("--trainer.max_time" in options)
    assert f"ended after step {steps}: {reason}" in err
    last = rows("r")[-2:]
    assert [row["step"] for row in last] == [str(steps)] * 2
    assert float(last[0]["learning_rate"]) == pytest.approx(0.005 / steps)  # in the last of the line's steps
    assert last[1]["val_loss"]
    assert json.loads(Path("runs/r/summary.json").read_text(encoding="utf-8"))["steps"] == steps
    assert Path("runs/r/checkpoints/best.safetensors").is_file()


@pytest.mark.parametrize(
    "more", [["--trainer.max_steps", "1000"], [*NO_STEPS, "--trainer.max_epochs", "100"]]
)
def test_a_time_limit_decays_the_learning_rate_over_the_time(more, workplace, clock, capsys):
    clock()
    limit = ["--trainer.max_time", "00:00:00:02", *more]
    linear = ["--model.optimizer.schedule", "linear", "--log_every", "1"]
    assert fit(*ADAMW, *linear, *limit, "--run", "r") == 0
    err = capsys.readouterr().err
    assert "0:00:02 of training (max_time)" in err
    assert "ended after step 16: max_time 0:00:02" in err
    rates = [float(row["learning_rate"]) for row in rows("r") if row["train_loss"]]
    assert len(rates) == 16
    peak = rates[2] / (14 / 16)
    for step, rate in enumerate(rates[2:], start=2):  # before the first update nothing is known of the speed
        assert rate == pytest.approx(peak * (1 - step / 16))


LINEAR = ["--model.optimizer.schedule", "linear", "--model.optimizer.lr", "0.01"]


def test_a_run_without_a_limit_is_refused(workplace, capsys):
    assert fit(*NO_STEPS) == 2
    assert "the run needs an end: give --trainer.max_steps" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_the_time_of_compiling_does_not_count_as_speed(workplace, clock, monkeypatch, capsys):
    """The first update takes 6.125 of 8 seconds: the 15 updates that fit into the rest are planned for."""
    monkeypatch.setattr(compilation, "compile_model", lambda module: None)
    used = clock(first=6.0)
    limit = [*NO_STEPS, "--trainer.max_time", "00:00:00:08", "--model.compile", "true"]
    assert fit(*ADAMW, *LINEAR, *limit, "--run", "r") == 0
    assert "ended after step 16: max_time 0:00:08" in capsys.readouterr().err
    assert used[:2] == pytest.approx(
        [0.01] * 2
    )  # until the second update has ended, nothing is known of the speed
    assert used[2:] == pytest.approx([0.01 * (1 - step / 16) for step in range(2, 16)])


def test_a_resumed_run_goes_on_with_the_learning_rate_of_its_time_limit(workplace, clock):
    """Its first update too: 8 of 16 updates are made when half of the 2 seconds is over."""
    used = clock()
    limit = [*LINEAR, "--trainer.max_time", "00:00:00:02"]
    assert fit(*ADAMW, *limit, "--trainer.max_steps", "8", "--run", "r") == 0
    used.clear()
    assert main(["fit", "--resume", "runs/r", *NO_STEPS]) == 0
    assert used == pytest.approx([0.01 * (1 - step / 16) for step in range(8, 16)])


def test_a_run_that_ended_by_its_epochs_resumes_exactly_for_more(workplace):
    epochs = [*ADAMW, *NO_STEPS, "--model.optimizer.schedule", "constant"]
    assert fit(*epochs, "--trainer.max_epochs", "1", "--run", "more") == 0
    assert main(["fit", "--resume", "runs/more", "--trainer.max_epochs", "3"]) == 0
    assert fit(*epochs, "--trainer.max_epochs", "3", "--run", "straight") == 0
    assert result(Path("runs/more"))[0] == result(Path("runs/straight"))[0]
    for row in rows("more"):  # of validations too, which come between two intervals
        assert int(float(row["tokens"])) == int(row["step"]) * 2 * 37 * 16


@pytest.mark.parametrize(("steps", "validated"), [(17, [8, 17]), (18, [8, 16, 18])])
def test_no_validation_comes_just_before_the_last(workplace, steps, validated):
    every = ["--trainer.val_check_interval", "8", "--trainer.max_steps", str(steps)]
    assert fit(*ADAMW, *every, "--run", "r") == 0
    assert [int(row["step"]) for row in rows("r") if row["val_loss"]] == validated


def test_early_stopping_ends_the_run_once_and_for_all(workplace, capsys):
    """With a learning rate that makes the loss worse."""
    worse = [
        "--model.optimizer.rest_lr",
        "3",
        "--trainer.val_check_interval",
        "1",
        "--trainer.max_steps",
        "99",
    ]
    assert fit(*ADAMW, *worse, "--trainer.max_steps", "99", "--early_stopping", "2", "--run", "r") == 0
    err = capsys.readouterr().err
    assert "early stopping: val_loss was lowest" in err
    losses = [float(row["val_loss"]) for row in rows("r") if row["val_loss"]]
    best = losses.index(min(losses)) + 1
    assert len(losses) == best + 2
    assert read("runs/r/checkpoints/best.safetensors").run.step == best
    before = result(Path("runs/r"))
    assert main(["fit", "--resume", "runs/r"]) == 0
    assert "ended after step" in capsys.readouterr().err
    assert result(Path("runs/r")) == before
    assert main(["fit", "--resume", "runs/r", "--early_stopping", "4"]) == 0
    assert len([row for row in rows("r") if row["val_loss"]]) == best + 4


def validated_as(monkeypatch, *losses: float) -> None:
    """Let the validations give these losses, the last one again and again."""
    left = list(losses)

    def log(self, metrics, original=LanguageModel.log_dict, **options):
        original(self, {**metrics, "val_loss": left.pop(0) if left[1:] else left[0]}, **options)

    monkeypatch.setattr(LanguageModel, "log_dict", log)


@pytest.mark.parametrize(
    ("losses", "patience", "steps"),
    [
        ((5.0, 4.0, 3.0, 2.0, 9.0), 1, 10),
        ((5.0, 4.0, 3.0, 3.5), 1, 8),
        ((5.0, float("inf"), float("nan")), 2, 6),
    ],
)
def test_early_stopping_ends_a_run_that_does_not_improve(
    losses, patience, steps, workplace, monkeypatch, capsys
):
    validated_as(monkeypatch, *losses)
    early = ["--early_stopping", str(patience), "--trainer.val_check_interval", "2"]
    assert fit(*ADAMW, *early, "--run", "r") == 0
    why = f"val_loss was lowest after step {steps - 2 * patience}"
    assert f"ended after step {steps}: early stopping: {why}" in capsys.readouterr().err


def test_a_run_whose_time_is_over_makes_no_step_when_it_is_resumed(workplace, clock, capsys):
    clock()
    assert fit(*ADAMW, *NO_STEPS, "--trainer.max_time", "00:00:00:02", "--run", "r") == 0
    before = result(Path("runs/r"))
    assert before[1][-1]["step"] == "16"
    capsys.readouterr()
    assert main(["fit", "--resume", "runs/r"]) == 0
    assert "ended after step 16: max_time 0:00:02" in capsys.readouterr().err
    assert result(Path("runs/r")) == before
    assert main(["fit", "--resume", "runs/r", "--trainer.max_time", "00:00:00:03"]) == 0
    assert "ended after step 24: max_time 0:00:03" in capsys.readouterr().err
