"""Scaled dot-product attention written out, and the causal mask: what every system of this package shares.

Shapes: ... any leading dimensions (batch, heads), T queries, S keys, K width of a key, V width of a value.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor


def causal_mask(length: int, device: torch.device | str | None = None) -> Tensor:
    """(length, length) boolean, True above the diagonal: where a query must not look."""
    return torch.ones(length, length, dtype=torch.bool, device=device).triu(diagonal=1)


def attend_folded(
    query: Tensor, key: Tensor, value: Tensor, hidden: Tensor, dropout_p: float = 0.0
) -> Tensor:
    """`attend` for one mask that all heads share, in fewer passes over memory; without the weights.

    PyTorch's fused attention has no bfloat16 arithmetic of its own on a CPU: up to some hundred tokens, plain
    products with batch and heads folded into one dimension, scale and mask folded into the first of them, are
    two to five times as fast.

    Args:
        query: (B, H, T, K).
        key: (B, H, S, K).
        value: (B, H, S, V).
        hidden: (T, S) boolean, True where a query must not look.
        dropout_p: probability that a weight is dropped.

    Returns:
        The context vectors (B, H, T, V).
    """
    batch, heads = query.shape[:2]
    query, key, value = (x.flatten(0, 1) for x in (query, key, value))  # (B * H, T or S, K or V)
    bias = torch.zeros_like(hidden, dtype=query.dtype).masked_fill(hidden, -torch.inf)  # (T, S)
    scores = torch.baddbmm(
        bias, query, key.transpose(1, 2), alpha=1 / math.sqrt(key.shape[-1])
    )  # (B * H, T, S)
    weights = torch.softmax(scores, dim=-1).to(value.dtype)  # (B * H, T, S)
    if dropout_p:
        weights = torch.dropout(weights, dropout_p, train=True)
    return (weights @ value).view(batch, heads, query.shape[1], value.shape[2])


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    hidden: Tensor | None = None,
    dropout: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(query key^T / sqrt(K)) value, with the weights (Vaswani et al. 2017, equation 1).

    Args:
        query: (..., T, K).
        key: (..., S, K).
        value: (..., S, V).
        hidden: boolean, broadcastable to (..., T, S), True where a query must not look. A row that is True
            throughout gives NaN, as any softmax over nothing.
        dropout: applied to the weights.

    Returns:
        The context vectors (..., T, V), and the weights (..., T, S) that made them, dropout included.
    """
    scores = query @ key.transpose(-2, -1) / math.sqrt(key.shape[-1])  # (..., T, S)
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    weights = torch.softmax(scores, dim=-1)  # (..., T, S)
    if dropout is not None:
        weights = dropout(weights)
    return weights @ value, weights  # (..., T, V)
