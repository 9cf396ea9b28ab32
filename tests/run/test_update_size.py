"""`--data.tokens_per_update`: the same updates, however they are divided over batches and processes."""

from pathlib import Path

import pytest
from tiny_runs import COMMAND

# A window has 16 tokens: an update of 384 tokens has 24 windows.
UPDATES = f"""{COMMAND} --trainer.accumulate_grad_batches 1 --data.tokens_per_update 384 --log_every 1
--model.config.dropout 0 --trainer.max_steps 6 --trainer.val_check_interval 3"""


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--data.tokens_per_update 390", "390 is no multiple of 16, a window on each process: give 384"),
        ("--data.tokens_per_update 0", "tokens_per_update must be at least 1, got 0"),
        ("--data.batch_size 0", "batch_size must be at least 1, got 0"),
        ("--trainer.accumulate_grad_batches 2", "decides accumulate_grad_batches: give only one"),
    ],
)
def test_what_cannot_be_divided_is_refused_in_one_line(option, message, workplace, refusal):
    assert message in refusal(f"{UPDATES} {option}")
    assert not Path("runs").exists()
