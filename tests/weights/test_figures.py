"""The figures of a model for its page."""

import pytest

from gpt.weights.checkpoint import RunPart
from gpt.weights.figures import Figures, bits_of_best


def test_a_corpus_that_is_no_text_is_not_shown():
    assert Figures.of(7, RunPart(options={"data": {"corpus": 3}})).text is None


@pytest.mark.parametrize(("step", "bits"), [(9, 1.5), (10, 2.0)], ids=["best", "later"])
def test_the_bits_of_the_best_checkpoint_are_those_at_its_temperature(step, bits):
    validation = {"val_bits_per_byte": 2.0, "val_loss": 4.0}
    run = RunPart(options={}, validation=validation, best_loss=3.0, best_step=9, step=step)
    assert Figures.of(7, run).bits_per_byte == bits


def test_without_a_ratio_of_losses_the_bits_are_as_they_are():
    """The checkpoint is not the best, or a loss is missing or zero."""
    assert bits_of_best(2.0, 4.0, 3.0) == 1.5
    for loss, best in ((None, 3.0), (0.0, 3.0), (4.0, None), (0.0, 0.0)):
        assert bits_of_best(2.0, loss, best) == 2.0
        validation = {"val_bits_per_byte": 2.0, "val_loss": loss}
        assert Figures.of(7, RunPart(validation=validation, best_loss=best)).bits_per_byte == 2.0
    assert bits_of_best(None, 4.0, 3.0) is None
