"""Updates, tokens, validations and the last learning rate of a run, against numbers worked out by hand."""

import pytest
from tiny_runs import TINY, rows

from gpt.cli import main

# The peak is 0.01, reached after 2 updates of warm-up, then a straight line to 0 at the last update. Before
# update k of n, counted from 0 after the warm-up, the rate is 0.01 * (1 - (k - 2) / (n - 2)): so the last
# update is made with 0.01 / (n - 2), and the rate logged after it is 0.
RECIPE = [
    *("--model.optimizer.lr", "0.01", "--model.optimizer.warmup_steps", "2", "--log_every", "1"),
    *("--trainer.accumulate_grad_batches", "1", "--trainer.val_check_interval", "2"),
]


@pytest.mark.parametrize(
    ("limits", "updates", "tokens_per_update", "batch_size", "tokens", "validated"),
    [
        # Without tokens_per_update, a batch is an update.
        ({"max_steps": 4}, 4, None, 10, 4 * 10 * 16, [2, 4]),
        # 20 windows of 16 tokens in 4 batches, and in 10 of 2, the largest that divides 20.
        ({"max_steps": 4}, 4, 320, 5, 1280, [2, 4]),
        ({"max_steps": 5}, 5, 320, 3, 1600, [2, 4, 5]),  # the last is validated
        # 652 windows of text, 100 in each of 20 batches of 5: 7 updates are an epoch.
        ({"max_epochs": 1}, 7, 1600, 5, 7 * 1600, [2, 4, 6, 7]),
        ({"max_steps": 5, "max_epochs": 2}, 5, 1600, 5, 5 * 1600, [2, 4, 5]),
        # An update takes an eighth of a second.
        ({"max_time": "00:00:00:01"}, 8, 320, 5, 2560, [2, 4, 6, 8]),
        ({"max_time": "00:00:00:01", "max_steps": 6}, 6, 320, 5, 1920, [2, 4, 6]),
    ],
)
def test_a_run_is_as_long_as_its_options_say(
    limits, updates, tokens_per_update, batch_size, tokens, validated, workplace, clock
):
    """On two processes: `test_tokens_per_update_make_the_same_run_on_any_number_of_processes`."""
    clock()
    options = ["--data.batch_size", str(batch_size), "--run", "r"]
    for name, value in ({"max_steps": -1} | limits).items():
        options += [f"--trainer.{name}", str(value)]
    if tokens_per_update:
        options += ["--data.tokens_per_update", str(tokens_per_update)]
    assert main([*TINY, *RECIPE, *options]) == 0
    logged = rows("r")
    trained = [row for row in logged if row["train_loss"]]
    assert [int(row["step"]) for row in trained] == list(range(1, updates + 1))
    assert int(float(trained[-1]["tokens"])) == tokens
    assert [int(row["step"]) for row in logged if row["val_loss"]] == validated
    rates = [float(row["learning_rate"]) for row in trained]
    assert rates[2] == pytest.approx(0.01)
    assert rates[-1] == pytest.approx(0.01 / (updates - 2))
