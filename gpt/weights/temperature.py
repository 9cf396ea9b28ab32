"""The temperature of a model: what its logits are divided by."""

from gpt.weights.formats.table import Weights

_NORM = ("final_norm.weight", "final_norm.bias")  # the head is linear in them


def with_temperature(weights: Weights, temperature: float) -> Weights:
    """Weights whose logits are those of `weights` divided by the temperature.

    The last norm's weights take it up, so they are an ordinary GPT's, which any program computes.
    """
    return {**weights, **{name: weights[name] / temperature for name in _NORM}}
