"""best.safetensors is the best of this run and this text, and nothing that was the best is lost."""

from pathlib import Path

import pytest
from tiny_runs import fit, gpt

from gpt.weights.checkpoint import read
from gpt.weights.load import find

SHORT = "--model.optimizer.name adamw --trainer.max_steps 4 --checkpoint_every 2"
RUN = f"{SHORT} --trainer.val_check_interval 2 --keep_checkpoints 9 --run r"
CHECKPOINTS = Path("runs/r/checkpoints")


def best() -> tuple[int, float]:
    """The step of best.safetensors, and the loss that the next validation has to beat."""
    saved = read(CHECKPOINTS / "best.safetensors").run
    return saved.step, saved.best_loss


def test_a_rewind_sets_the_later_best_aside(workplace):
    assert fit(RUN) == 0
    before = best()
    assert before[0] == 4
    worse = "--model.optimizer.lr 0 --trainer.max_steps 4"
    assert gpt(f"fit --resume {CHECKPOINTS / 'step-2.safetensors'} {worse}") == 0
    assert best()[1] > before[1]  # the best since step 2
    aside = CHECKPOINTS / "best-step-4.safetensors"
    assert read(aside).run.step == 4
    assert before[1] == pytest.approx(read(aside).run.best_loss)
    assert find() == CHECKPOINTS / "best.safetensors"


def test_the_best_of_another_branch_is_not_the_best_of_this_one(workplace):
    """Both have their best after step 4; the first run is the better one, and goes on."""
    assert fit(RUN) == 0
    before = best()
    worse = "--model.optimizer.lr 0 --trainer.max_steps 4"
    assert gpt(f"fit --resume {CHECKPOINTS / 'step-2.safetensors'} {worse}") == 0
    assert best()[0] == before[0] and best()[1] > before[1]
    no_better = "--model.optimizer.lr 0 --model.optimizer.rest_lr 0 --trainer.max_steps 5"
    assert gpt(f"fit --resume {CHECKPOINTS / 'last-step-4.safetensors'} {no_better}") == 0
    assert best() == before
    assert read(CHECKPOINTS / "best-step-4-2.safetensors").run.best_loss > before[1]


def test_another_text_begins_the_best_again(workplace, capsys):
    assert fit(f"{RUN} --model.optimizer.lr 0.05 --model.optimizer.warmup_steps 0") == 0
    before = best()
    harder = "".join(f"{number * 7919 % 10007} " for number in range(4000))
    (workplace / "other.txt").write_text(harder, "utf-8")
    more = "--data.corpus other.txt --trainer.max_steps 6 --model.optimizer.lr 0"
    assert gpt(f"fit --resume runs/r {more}") == 0
    assert "the text is not the one that this run was trained on" in capsys.readouterr().err
    after = best()
    assert after[0] == 6
    assert after[1] > before[1]  # a harder text: its loss never beats the old one
    assert read(CHECKPOINTS / "best-step-4.safetensors").run.step == 4


def test_a_run_that_has_no_best_takes_another_text(workplace):
    assert fit(f"{RUN} --data.val_fraction 0") == 0
    (workplace / "other.txt").write_text("".join(f"{number} " for number in range(4000)), encoding="utf-8")
    more = "--data.corpus other.txt --trainer.max_steps 6 --data.val_fraction 0.1"
    assert gpt(f"fit --resume runs/r {more}") == 0
    assert best()[0] == 6


def test_attention_to_other_documents_begins_the_best_again(workplace, capsys):
    assert fit(RUN) == 0
    more = "--data.isolate true --trainer.max_steps 6 --model.optimizer.lr 0"
    assert gpt(f"fit --resume runs/r {more}") == 0
    assert "attention to other documents than before: the best" in capsys.readouterr().err


def test_losses_of_another_kind_begin_the_best_again(workplace, capsys):
    """With temperature scaling a loss is lower: the losses so far are no measure."""
    assert fit(f"{RUN} --temperature_scaling true") == 0
    more = "--temperature_scaling false --trainer.max_steps 6 --model.optimizer.lr 0"
    assert gpt(f"fit --resume runs/r {more}") == 0
    assert "losses with temperature scaling are lower than those without: the" in capsys.readouterr().err
    assert best()[0] == 6
