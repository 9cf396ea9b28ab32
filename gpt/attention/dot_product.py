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
