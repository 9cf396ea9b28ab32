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


HARDER = "".join(f"{number * 7919 % 10007} " for number in range(4000))
BEGINS_AGAIN = {
    "harder text, whose loss is never as low": (
        "--model.optimizer.lr 0.05 --model.optimizer.warmup_steps 0",
        "--data.corpus other.txt",
        "the text is not the one that this run was trained on",
    ),
    "attention": (
        "",
        "--data.isolate true",
        "held-out text is scored with attention to other documents than before",
    ),
    "losses of another kind": (
        "--temperature_scaling true",
        "--temperature_scaling false",
        "losses with temperature scaling are lower than those without",
    ),
}


@pytest.mark.parametrize(("first", "then", "why"), BEGINS_AGAIN.values(), ids=BEGINS_AGAIN)
def test_where_losses_so_far_are_no_measure_the_best_begins_again(first, then, why, workplace, capsys):
    assert fit(f"{RUN} {first}") == 0
    before, _ = best()
    (workplace / "other.txt").write_text(HARDER, "utf-8")
    assert gpt(f"fit --resume runs/r {then} --trainer.max_steps 6 --model.optimizer.lr 0") == 0
    assert f"{why}: the best checkpoint begins again\n" in capsys.readouterr().err
    assert best()[0] == 6
    assert read(CHECKPOINTS / f"best-step-{before}.safetensors").run.step == before


def test_a_run_that_has_no_best_takes_another_text(workplace):
    assert fit(f"{RUN} --data.val_fraction 0") == 0
    (workplace / "other.txt").write_text(HARDER, "utf-8")
    more = "--data.corpus other.txt --trainer.max_steps 6 --data.val_fraction 0.1"
    assert gpt(f"fit --resume runs/r {more}") == 0
    assert best()[0] == 6
