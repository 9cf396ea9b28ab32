"""The attention that the page shows: from the last token of a text to all before it."""

from collections.abc import Sequence
from typing import Any

import torch

from gpt.attention.capture import capture_weights
from gpt.model import GPT
from gpt.tokenizer import Tokenizer


@torch.inference_mode()
def last_token_attention(model: GPT, tokenizer: Tokenizer, tokens: Sequence[int]) -> dict[str, Any]:
    """The attention weights of the last of T tokens, by layer, head and key, rounded.

    Returns:
        `tokens`, the text of each; and `weights`, (layers, heads, T) as nested lists.
    """
    device = model.token_embedding.weight.device
    with capture_weights(model) as captured:
        model.features(torch.tensor([list(tokens)], device=device))
    weights = torch.stack([layer[0, :, -1] for layer in captured.values()])  # (layers, heads, T)
    return {
        "tokens": [tokenizer.decode([token]) for token in tokens],
        "weights": [[[round(w, 4) for w in head] for head in layer] for layer in weights.tolist()],
    }
