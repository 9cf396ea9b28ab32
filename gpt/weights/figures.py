"""The figures of a model that its page shows: its size, and the text, minutes and result of its run."""

from dataclasses import dataclass

from gpt.files import readable
from gpt.weights.checkpoint import RunPart


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The figures of a model. Those of its run are None if the checkpoint does not know them."""

    parameters: int
    text: str | None = None
    """The corpus; of a path only the last part."""
    bits_per_byte: float | None = None
    """Bits per byte of held-out text at the last validation before the checkpoint was saved.

    For the run's best checkpoint they are those at its temperature, as `gpt runs` shows them.
    """
    minutes: float | None = None
    """Minutes of training and validation."""

    @classmethod
    def of(cls, parameters: int, run: RunPart | None) -> "Figures":
        """Return the figures of a model with so many parameters, and those of its run, if it has one."""
        if run is None:
            return cls(parameters=parameters)
        return cls(
            parameters=parameters,
            text=readable(run.text) or None,
            bits_per_byte=_bits_per_byte(run),
            minutes=run.seconds / 60,
        )


def _bits_per_byte(run: RunPart) -> float | None:
    """Return the bits per byte of a run's checkpoint, None if it was not validated."""
    bits, loss = run.validation.get("val_bits_per_byte"), run.validation.get("val_loss")
    if loss and run.best_loss and run.best_step == run.step:
        return bits_of_best(bits, loss, run.best_loss)  # the best loss is that at its temperature
    return bits


def bits_of_best(bits: float | None, loss: float | None, best_loss: float | None) -> float | None:
    """Return the bits per byte at the best loss, from the last validation's bits and loss.

    All validations score the same text, so the ratio of bits to loss is the same. None if one is missing.
    """
    if bits is None or loss is None or best_loss is None:
        return None
    return bits * best_loss / loss if loss else bits
