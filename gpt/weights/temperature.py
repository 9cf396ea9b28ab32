"""The temperature of a model: what its logits are divided by."""

from gpt.weights.formats.table import Weights

_NORM = "final_norm."  # in whose tensors the head is linear


def with_temperature(weights: Weights, temperature: float) -> Weights:
    """Weights whose logits are those of `weights` divided by the temperature.

    The last norm's weights take it up, so they are an ordinary GPT's, which any program computes.
    """
    if temperature == 1:
        return weights
    return {name: t / temperature if name.startswith(_NORM) else t for name, t in weights.items()}
