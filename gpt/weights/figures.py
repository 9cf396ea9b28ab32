"""The figures of a model that its page shows: its size, and the text, minutes and result of its run."""

from dataclasses import dataclass

from gpt.files import readable
from gpt.weights.checkpoint import RunPart
from gpt.weights.formats.table import Weights


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
    def of_weights(cls, weights: Weights, run: RunPart | None) -> "Figures":
        """Return the figures of a model with these weights, without a tied head, and those of its run."""
        return cls.of(sum(weight.numel() for weight in weights.values()), run)

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
    is_best = run.best_step == run.step  # then its best loss is that at its temperature
    return bits_of_best(bits, loss, run.best_loss if is_best else None)


def bits_of_best(bits: float | None, loss: float | None, best_loss: float | None) -> float | None:
    """Return the bits per byte at the best loss, from the last validation's bits and loss.

    All validations score the same text, so the ratio of bits to loss is the same. Without a loss, or with one
    of zero, there is no ratio, and the bits are returned as they are.
    """
    if bits is None or not loss or best_loss is None:
        return bits
    return bits * best_loss / loss
