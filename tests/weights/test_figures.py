"""The figures of a model for its page."""

import pytest

from gpt.weights.checkpoint import RunPart
from gpt.weights.figures import Figures


def test_a_run_knows_its_text_minutes_and_bits():
    run = RunPart(
        options={"data": {"corpus": "texts/my.txt"}}, seconds=90.0, validation={"val_bits_per_byte": 1.5}
    )
    assert Figures.of(7, run) == Figures(parameters=7, text="my.txt", bits_per_byte=1.5, minutes=1.5)


@pytest.mark.parametrize("options", [{}, {"data": None}, {"data": {"corpus": 3}}])
def test_a_model_without_a_run_or_with_other_options_has_no_text(options):
    assert Figures.of(7, None) == Figures(parameters=7, text=None, bits_per_byte=None, minutes=None)
    assert Figures.of(7, RunPart(options=options)).text is None


def test_the_bits_of_the_best_checkpoint_are_those_at_its_temperature():
    validation: dict[str, float | None] = {"val_bits_per_byte": 2.0, "val_loss": 4.0}
    best = RunPart(options={}, validation=validation, best_loss=3.0, best_step=9, step=9)
    assert Figures.of(7, best).bits_per_byte == 1.5
    later = RunPart(options={}, validation=validation, best_loss=3.0, best_step=9, step=10)
    assert Figures.of(7, later).bits_per_byte == 2.0
