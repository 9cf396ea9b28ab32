"""GPT-2 as other programs compute it. It does not use `gpt/model.py`, because users may edit that file.

Shapes: B batch, T tokens, D emb_dim, H heads, K width of a head, V vocab_size.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from gpt.config import GPTConfig
from gpt.errors import InputError
from gpt.generation.decoding import EXACT, texts_to_compare
from gpt.generation.samples import NOT_FINITE
from gpt.model import GPT
from gpt.weights.formats.table import Weights


def logits(config: GPTConfig, weights: Weights, tokens: Tensor) -> Tensor:
    """Compute the logits of each next token from weights with a GPT's names: (B, T) -> (B, T, V).

    The tensors have to pass `check_known`. Raises RuntimeError for one of another shape.
    """
    width = config.emb_dim

    def linear(x: Tensor, name: str, outputs: int) -> Tensor:
        weight = weights[f"{name}.weight"]
        if tuple(weight.shape) != (outputs, x.shape[2]):
            raise RuntimeError(f"{name} is not of shape {(outputs, x.shape[2])}")
        return F.linear(x, weight, weights.get(f"{name}.bias"))

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (width,), weights[f"{name}.weight"], weights[f"{name}.bias"])

    def heads(x: Tensor, name: str) -> Tensor:
        parts = linear(x, name, width).view(*x.shape[:2], config.num_heads, -1)  # (B, T, H, K)
        return parts.transpose(1, 2)  # (B, H, T, K)

    x = weights["token_embedding.weight"][tokens] + weights["position_embedding.weight"][: tokens.shape[1]]
    for block in (f"blocks.{number}" for number in range(config.num_layers)):
        inputs = norm(x, f"{block}.attention_norm")
        query = heads(inputs, f"{block}.attention.W_query")
        key = heads(inputs, f"{block}.attention.W_key")
        value = heads(inputs, f"{block}.attention.W_value")
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)  # (B, H, T, K)
        x = x + linear(attended.transpose(1, 2).flatten(2), f"{block}.attention.out_proj", width)
        inputs = norm(x, f"{block}.feed_forward_norm")
        wide = linear(inputs, f"{block}.feed_forward.up", 4 * width)  # (B, T, 4 * D)
        activated = F.gelu(wide, approximate="none" if config.exact_gelu else "tanh")
        x = x + linear(activated, f"{block}.feed_forward.down", width)
    head = "token_embedding" if config.tie_embeddings else "head"
    return linear(norm(x, "final_norm"), head, config.vocab_size)


@torch.no_grad()
def is_gpt2(model: GPT) -> bool:
    """Whether a model gives the same logits as GPT-2 with its weights.

    The model must be float32, on the CPU and in evaluation mode. Raises InputError if GPT-2's logits are not
    finite: then the weights are damaged, whatever the model computes.
    """
    tokens = texts_to_compare(model)
    own = model(tokens).double()
    try:
        expected = logits(model.config, model.state_dict(), tokens).double()
        difference = (own - expected).square().mean().sqrt()
    except RuntimeError:  # a tensor has another shape
        return False
    if not expected.isfinite().all():
        raise InputError(NOT_FINITE)
    return bool(difference <= EXACT * expected.square().mean().sqrt())
