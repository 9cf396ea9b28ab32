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
            bits_per_byte=bits_of_best(
                run.validation.get("val_bits_per_byte"),
                run.validation.get("val_loss"),
                run.best_loss if run.best_step == run.step else None,
            ),
            minutes=run.seconds / 60,
        )


def bits_of_best(bits: float | None, loss: float | None, best_loss: float | None) -> float | None:
    """Return the bits per byte at the best loss, from the last validation's bits and loss.

    All validations score the same text, so the ratio of bits to loss is the same. Without a loss, or with one
    of zero, there is no ratio, and the bits are returned as they are.
    """
    if bits is None or not loss or best_loss is None:
        return bits
    return bits * best_loss / loss
