"""best.safetensors is the best of this run and this text, and nothing that was the best is lost."""

from pathlib import Path

import pytest
from tiny_runs import fit

from gpt.cli import main
from gpt.weights.checkpoint import read
from gpt.weights.load import find

SHORT = ["--model.optimizer.name", "adamw", "--trainer.max_steps", "4", "--checkpoint_every", "2"]
RUN = [*SHORT, "--trainer.val_check_interval", "2", "--keep_checkpoints", "9", "--run", "r"]
CHECKPOINTS = Path("runs/r/checkpoints")


def best() -> tuple[int, float]:
    """The step of best.safetensors, and the loss that the next validation has to beat."""
    saved = read(CHECKPOINTS / "best.safetensors").run
    return saved.step, saved.best_loss


def test_a_rewind_sets_the_later_best_aside(workplace):
    assert fit(*RUN) == 0
    before = best()
    assert before[0] == 4
    worse = ["--model.optimizer.lr", "0", "--trainer.max_steps", "4"]
    assert main(["fit", "--resume", str(CHECKPOINTS / "step-2.safetensors"), *worse]) == 0
    assert best()[1] > before[1]  # the best since step 2
    aside = CHECKPOINTS / "best-step-4.safetensors"
    assert read(aside).run.step == 4
    assert before[1] == pytest.approx(read(aside).run.best_loss)
    assert find() == CHECKPOINTS / "best.safetensors"


def test_a_run_has_one_text(workplace, capsys):
    assert fit(*RUN) == 0
    before = best()
    (workplace / "other.txt").write_text("".join(f"{number} " for number in range(4000)), encoding="utf-8")
    assert main(["fit", "--resume", "runs/r", "--data.corpus", "other.txt", "--trainer.max_steps", "6"]) == 2
    assert "the text is not the one that this run was trained on: start a run" in capsys.readouterr().err
    assert best() == before


def test_a_best_that_a_kill_left_without_its_name_is_named(workplace):
    assert fit(*RUN) == 0
    before = best()
    (CHECKPOINTS / "best.safetensors").unlink()
    more = ["--trainer.max_steps", "6", "--model.optimizer.lr", "0"]
    more += ["--model.optimizer.rest_lr", "0"]  # the loss stays what it was
    assert main(["fit", "--resume", "runs/r", *more]) == 0
    assert best() == before
