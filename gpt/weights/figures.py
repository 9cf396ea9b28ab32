"""The figures of a model that its page shows: its size, and the text, minutes and result of its run."""

from gpt.files import readable
from gpt.plain import JsonObject
from gpt.weights.checkpoint import RunPart


def figures_of(parameters: int, run: RunPart | None) -> JsonObject:
    """Return the figures of a model of so many weights. Those of its run are None if they are not known.

    `text` is the corpus, of a path only the last part. `bits_per_byte` is the result of the last validation
    before the checkpoint was saved; of the best checkpoint at its temperature, as `gpt runs` shows it.
    `minutes` are those of training and validation.
    """
    if run is None:
        return {"parameters": parameters, **dict.fromkeys(("text", "bits_per_byte", "minutes"))}
    bits, loss = run.validation.get("val_bits_per_byte"), run.validation.get("val_loss")
    is_best = run.best_step == run.step
    return {
        "parameters": parameters,
        "text": readable(run.text) or None,
        "bits_per_byte": bits_of_best(bits, loss, run.best_loss if is_best else None),
        "minutes": run.seconds / 60,
    }


def bits_of_best(bits: float | None, loss: float | None, best_loss: float | None) -> float | None:
    """Return the bits per byte at the best loss, from the last validation's bits and loss.

    All validations score the same text, so the ratio of bits to loss is the same. Without a loss, or with one
    of zero, there is no ratio, and the bits are returned as they are.
    """
    if bits is None or not loss or best_loss is None:
        return bits
    return bits * best_loss / loss
