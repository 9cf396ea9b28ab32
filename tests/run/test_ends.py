"""A run ends where its limits say, its learning rate decayed and its last step validated."""

from pathlib import Path

import pytest
from tiny_runs import checkpoint, fit, gpt, result, rows, summary

from gpt.errors import DivergedError
from gpt.training import compilation
from gpt.training.module import LanguageModel

ADAMW = "--model.optimizer.name adamw --run r"
# The rate falls in a straight line from 0.01: before update k of n it is 0.01 * (1 - k / n).
LINEAR = f"{ADAMW} --log_every 1 --model.optimizer.schedule linear --model.optimizer.lr 0.01"
FROM_THE_PEAK = f"{LINEAR} --model.optimizer.warmup_steps 0"
NO_STEPS = "--trainer.max_steps -1"


def line(first: int, steps: int) -> object:
    """The learning rates of a run of so many steps, from the step after `first` on."""
    return pytest.approx([0.01 * (1 - step / steps) for step in range(first, steps)])


def validated_steps(run: str) -> list[int]:
    return [int(row["step"]) for row in rows(run) if row["val_loss"]]


LENGTHS = {
    "10 batches of 2, the largest that divides 20 windows; the last step is validated": (
        "--trainer.max_steps 5 --data.batch_size 3 --data.tokens_per_update 320",
        (5, 320, [2, 4, 5]),
        "5 steps (max_steps 5)",
        "max_steps 5",
    ),
    "the text has 652 windows, an update 100": (
        f"{NO_STEPS} --trainer.max_epochs 1 --data.batch_size 5 --data.tokens_per_update 1600",
        (7, 1600, [2, 4, 6, 7]),
        "7 steps (max_epochs 1)",
        "max_epochs 1",
    ),
    "the first of two limits": (
        "--trainer.max_steps 5 --trainer.max_epochs 2 --data.batch_size 5 --data.tokens_per_update 1600",
        (5, 1600, [2, 4, 5]),
        "5 steps (max_steps 5)",
        "max_steps 5",
    ),
    "an update takes an eighth of a second": (
        "--trainer.max_steps 1000 --trainer.max_time 1s --data.batch_size 20",
        (8, 320, [2, 4, 6, 8]),
        "1000 steps (max_steps 1000), 0:00:01 of training (max_time), whichever comes first",
        "max_time 0:00:01",
    ),
    "steps before time": (
        "--trainer.max_steps 6 --trainer.max_time 1s --data.batch_size 20",
        (6, 320, [2, 4, 6]),
        "6 steps (max_steps 6), 0:00:01 of training (max_time), whichever comes first",
        "max_steps 6",
    ),
}


@pytest.mark.parametrize(("options", "run", "plan", "reason"), LENGTHS.values(), ids=LENGTHS)
def test_a_run_is_as_long_as_its_options_say(options, run, plan, reason, workplace, clock, capsys):
    """With so many tokens an update. Two processes: test_distributed.py."""
    updates, tokens, validated = run
    used = clock()
    intervals = "--trainer.accumulate_grad_batches 1 --trainer.val_check_interval 2"
    assert fit(LINEAR, "--model.optimizer.warmup_steps 2", intervals, options) == 0
    err = capsys.readouterr().err
    assert f"planned: {plan}\n" in err
    assert f"ended after step {updates}: {reason}" in err
    trained = [row for row in rows("r") if row["train_loss"]]
    assert [int(row["step"]) for row in trained] == list(range(1, updates + 1))
    assert int(float(trained[-1]["tokens"])) == updates * tokens
    assert validated_steps("r") == validated
    rates = [float(row["learning_rate"]) for row in trained]
    assert rates == pytest.approx(used)
    assert rates[2:] == line(0, updates - 2)
    assert summary("r")["steps"] == updates
    assert Path("runs/r/checkpoints/best.safetensors").is_file()


def test_the_time_of_compiling_does_not_count_as_speed(workplace, clock, monkeypatch, capsys):
    """The first update takes 6.125 of 8 seconds: the 15 updates that fit into the rest are planned for."""
    monkeypatch.setattr(compilation, "compile_model", lambda module: None)
    used = clock(first=6.0)
    assert fit(FROM_THE_PEAK, NO_STEPS, "--trainer.max_time 8s --model.compile true") == 0
    assert "ended after step 16: max_time 0:00:08" in capsys.readouterr().err
    # Until the second update has ended, nothing is known of the speed.
    assert used[:2] == pytest.approx([0.01, 0.01])
    assert used[2:] == line(2, 16)


def test_a_resumed_run_goes_on_with_the_learning_rate_of_its_time_limit(workplace, clock):
    """Its first update too: 8 of 16 updates are made when half of the 2 seconds is over."""
    used = clock()
    assert fit(FROM_THE_PEAK, "--trainer.max_time 2s --trainer.max_steps 8") == 0
    used.clear()
    assert gpt(f"fit --resume runs/r {NO_STEPS}") == 0
    assert used == line(8, 16)


def test_a_run_whose_time_is_over_makes_no_step_when_it_is_resumed(workplace, clock, capsys):
    clock()
    assert fit(ADAMW, NO_STEPS, "--trainer.max_time 2s") == 0
    before = result("r")
    capsys.readouterr()
    assert gpt("fit --resume runs/r") == 0
    assert "ended after step 16: max_time 0:00:02" in capsys.readouterr().err
    assert result("r") == before
    assert gpt("fit --resume runs/r --trainer.max_time 3s") == 0
    assert "ended after step 24: max_time 0:00:03" in capsys.readouterr().err


def test_a_run_that_ended_by_its_epochs_resumes_exactly_for_more(workplace):
    epochs = f"{ADAMW} {NO_STEPS} --model.optimizer.schedule constant"
    assert fit(epochs, "--trainer.max_epochs 1 --run more") == 0
    assert gpt("fit --resume runs/more --trainer.max_epochs 3") == 0
    assert fit(epochs, "--trainer.max_epochs 3 --run straight") == 0
    assert result("more")[0] == result("straight")[0]
    for row in rows("more"):  # of validations too, which come between two intervals
        assert int(float(row["tokens"])) == int(row["step"]) * 2 * 37 * 16


@pytest.mark.parametrize(("steps", "validated"), [(17, [8, 17]), (18, [8, 16, 18])])
def test_no_validation_comes_just_before_the_last(workplace, steps, validated):
    assert fit(ADAMW, f"--trainer.val_check_interval 8 --trainer.max_steps {steps}") == 0
    assert validated_steps("r") == validated


@pytest.fixture
def held_out_losses(monkeypatch) -> list[float]:
    """The losses of a run's validations, to be filled; the last one is that of all further ones."""
    left: list[float] = []

    def log(self, metrics, original=LanguageModel.log_dict, **options):
        loss = left.pop(0) if left[1:] else left[0]
        original(self, {**metrics, "val_loss": loss, "val_perplexity": loss}, **options)

    monkeypatch.setattr(LanguageModel, "log_dict", log)
    return left


@pytest.mark.parametrize("first", [float("inf"), float("nan"), 1e30])
def test_a_first_held_out_loss_that_cannot_be_kept_ends_no_run(first, workplace, held_out_losses):
    """With a rate that is too high it may be that of a perplexity of 1e30."""
    held_out_losses += [first, 4.0]
    assert fit(ADAMW, "--trainer.val_check_interval 2 --trainer.max_steps 4") == 0
    assert checkpoint("r", "best").run.best_loss == 4.0


def test_epochs_count_the_text_whatever_the_size_of_an_update(workplace):
    """A second epoch in batches of twice the size: half as many updates."""
    epochs = f"{ADAMW} {NO_STEPS} --trainer.accumulate_grad_batches 1"
    assert fit(epochs, "--data.batch_size 20 --trainer.max_epochs 1") == 0
    first = checkpoint("r").run
    assert gpt("fit --resume runs/r --data.batch_size 40 --trainer.max_epochs 2") == 0
    second = checkpoint("r").run
    assert second.step - first.step == pytest.approx(first.step / 2, abs=2)
    assert second.place == pytest.approx(2 * first.place, abs=40)


@pytest.mark.parametrize(
    ("losses", "best"),
    [((5.0, 6.0, 3.0, 3.5), 6), ((5.0, float("inf"), float("nan")), 2)],
    ids=["rises, falls and rises", "is not finite"],
)
def test_early_stopping_ends_a_run_once_and_for_all(losses, best, workplace, held_out_losses, capsys):
    """After two validations that were no better."""
    held_out_losses += losses
    assert fit(ADAMW, "--trainer.val_check_interval 2 --early_stopping 2") == 0
    told = f"ended after step {best + 4}: early stopping: val_loss was lowest after step {best}"
    assert told in capsys.readouterr().err
    assert checkpoint("r", "best").run.step == best
    before = result("r")
    assert gpt("fit --resume runs/r") == 0
    assert "ended after step" in capsys.readouterr().err
    assert result("r") == before
    assert gpt("fit --resume runs/r --early_stopping 4") == 0
    assert validated_steps("r")[-1] == best + 8


def test_a_loss_that_is_infinite_is_no_damaged_file(workplace, capsys):
    """No sample can be drawn from such weights. The next update says what is wrong."""
    wild = "--model.optimizer.lr 1e38 --model.optimizer.warmup_steps 0 --trainer.val_check_interval 1"
    assert fit(ADAMW, wild) == DivergedError.status
    err = capsys.readouterr().err
    assert "weights after step 1 are not finite: they are not saved; lower the learning rate" in err
    assert "damaged" not in err
