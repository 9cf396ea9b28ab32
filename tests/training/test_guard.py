"""Numbers going wrong."""

import math
from itertools import count
from pathlib import Path

from tiny_runs import fit

from gpt.errors import DivergedError
from gpt.training.module import LanguageModel
from gpt.weights.checkpoint import read

STEPS = "--trainer.max_steps 8 --checkpoint_every 1 --keep_checkpoints 9 --run bad"


def test_it_stops_before_the_weights_are_touched(workplace, monkeypatch, capsys):
    """The loss of the twelfth batch, the second one of step 6, is infinite."""
    batches = count(1)

    def loss(self, batch, original=LanguageModel.loss):
        result = original(self, batch)
        return result * math.inf if self.training and next(batches) == 12 else result

    monkeypatch.setattr(LanguageModel, "loss", loss)
    assert fit(STEPS) == DivergedError.status
    err = capsys.readouterr().err
    assert "at step 6: stopped before weights changed" in err
    assert err.count("gpt fit: ") == 1
    saved = read("runs/bad/checkpoints/last.safetensors")
    assert saved.run.step == 5
    assert all(weight.isfinite().all() for weight in saved.weights.values())


def test_weights_that_are_not_finite_are_not_saved(workplace, capsys):
    """The first update makes them so, and is also the last."""
    wild = "--model.optimizer.name adamw --model.optimizer.lr 1e38 --model.optimizer.warmup_steps 0"
    decay = "--model.optimizer.weight_decay 9 --model.optimizer.embedding_weight_decay 9"
    options = f"{STEPS} {wild} {decay} --data.val_fraction 0 --trainer.max_steps 1"
    assert fit(options) == DivergedError.status
    assert "lower the learning rate" in capsys.readouterr().err
    saved = [read(path) for path in Path("runs/bad/checkpoints").iterdir()]
    assert all(weight.isfinite().all() for each in saved for weight in each.weights.values())


def test_a_finite_loss_with_a_gradient_that_is_not_stops_too(workplace, monkeypatch, capsys):
    def loss(self, batch, original=LanguageModel.loss):
        result = original(self, batch)
        result.register_hook(lambda gradient: gradient * math.nan)
        return result

    monkeypatch.setattr(LanguageModel, "loss", loss)
    assert fit(STEPS, "--data.val_fraction 0") == DivergedError.status
    assert "gradient norm nan at step 1" in capsys.readouterr().err
    assert not list(Path("runs/bad/checkpoints").iterdir())
