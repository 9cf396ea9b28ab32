"""`--data.tokens_per_update`: the same updates, however they are divided over batches and processes."""

from pathlib import Path

import pytest
import torch
from tiny_runs import COMMAND, gpt, rows

from gpt.training.module import LanguageModel

# A window has 16 tokens: an update of 384 tokens has 24 windows.
UPDATES = f"""{COMMAND} --trainer.accumulate_grad_batches 1 --data.tokens_per_update 384 --log_every 1
--model.config.dropout 0 --trainer.max_steps 6 --trainer.val_check_interval 3"""


@pytest.fixture
def seen(monkeypatch) -> list[torch.Tensor]:
    """The inputs of all training batches, in order."""
    batches: list[torch.Tensor] = []

    def step(self, batch, number, original=LanguageModel.training_step):
        batches.append(batch[0].clone())
        return original(self, batch, number)

    monkeypatch.setattr(LanguageModel, "training_step", step)
    return batches


def test_updates_are_the_same_whatever_the_micro_batch(seen, workplace):
    """In one batch of 24 windows, or three of 8."""
    assert gpt(f"{UPDATES} --data.batch_size 100 --run whole") == 0
    assert {len(batch) for batch in seen} == {24}
    whole = torch.cat(seen)
    seen.clear()
    assert gpt(f"{UPDATES} --data.batch_size 11 --run split") == 0
    assert {len(batch) for batch in seen} == {8}
    assert torch.equal(torch.cat(seen), whole)
    figures = ("step", "tokens", "train_loss", "val_loss", "learning_rate", "gradient_norm")
    for one, other in zip(rows("whole"), rows("split"), strict=True):
        for name in figures:
            assert (float(one[name] or 0)) == pytest.approx(float(other[name] or 0), rel=1e-4), name
    assert [row["step"] for row in rows("split") if row["val_loss"]] == ["3", "6"]


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
