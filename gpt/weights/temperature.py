"""The temperature of a model: the number that its logits are divided by."""

from gpt.weights.formats.table import Weights

_NORM = "final_norm."  # the logits are linear in its tensors


def with_temperature(weights: Weights, temperature: float) -> Weights:
    """Return weights whose logits are those of `weights` divided by the temperature.

    Only the last norm's weights are scaled, so the result is an ordinary GPT that any program can compute.
    """
    if temperature == 1:
        return weights
    return {name: t / temperature if name.startswith(_NORM) else t for name, t in weights.items()}
