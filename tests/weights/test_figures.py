"""The figures of a model for its page."""

import pytest

from gpt.weights.checkpoint import RunPart
from gpt.weights.figures import bits_of_best, figures_of

BITS = {
    "the best": ((2.0, 4.0, 3.0), 1.5),
    "not validated": ((None, 4.0, 3.0), None),
    "no loss": ((2.0, None, 3.0), 2.0),
    "a loss of zero": ((2.0, 0.0, 3.0), 2.0),
    "no best loss": ((2.0, 4.0, None), 2.0),
}


@pytest.mark.parametrize(("given", "bits"), BITS.values(), ids=BITS)
def test_the_bits_at_the_best_loss_or_as_they_are(given, bits):
    assert bits_of_best(*given) == bits


def test_the_figures_of_a_checkpoint():
    """The bits of the best one are those at its temperature. A corpus that is no text is not shown."""
    validation = {"val_bits_per_byte": 2.0, "val_loss": 4.0}
    options = {"data": {"corpus": 3}}
    for step, bits in ((9, 1.5), (10, 2.0)):
        run = RunPart(options=options, validation=validation, best_loss=3.0, best_step=9, step=step)
        assert figures_of(7, run) == {"parameters": 7, "text": None, "bits_per_byte": bits, "minutes": 0}
