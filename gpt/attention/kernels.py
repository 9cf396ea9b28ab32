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


def attend_in_blocks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, dropout_p: float = 0.0, block: int | None = None
) -> Tensor:
    """`attend` under the causal mask in fewer passes over memory, without the weights.

    In bfloat16 on a CPU, most of all in the backward pass, PyTorch's fused attention was measured slower than
    plain products up to about a thousand tokens (docs/benchmarks.md). Batch and heads are folded into one
    dimension, scale and mask into the first product, and each block of queries meets the keys up to its end.

    Args:
        query: (B, H, T, K).
        key: (B, H, T, K).
        value: (B, H, T, V).
        mask: (T, T), the causal mask.
        dropout_p: probability that a weight is dropped.
        block: how many queries at a time; all if left out.

    Returns:
        The context vectors (B, H, T, V).
    """
    batch, heads, length, width = query.shape
    query, key, value = (x.flatten(0, 1) for x in (query, key, value))  # (B * H, T, K or V)
    bias = torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask, -torch.inf)  # (T, T)
    contexts, end = [], 0
    for queries in torch.split(query, block, dim=1) if block else (query,):
        start, end = end, end + queries.shape[1]
        seen = key[:, :end].transpose(1, 2)  # (B * H, K, S), S the end of the block
        scores = torch.baddbmm(
            bias[start:end, :end], queries, seen, alpha=1 / math.sqrt(width)
        )  # (B * H, block, S)
        weights = torch.softmax(scores, dim=-1).to(value.dtype)  # (B * H, block, S)
        if dropout_p:
            weights = torch.dropout(weights, dropout_p, train=True)
        contexts.append(weights @ value[:, :end])  # (B * H, block, V)
    return torch.cat(contexts, dim=1).view(batch, heads, length, value.shape[2])


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
