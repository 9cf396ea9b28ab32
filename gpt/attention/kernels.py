"""Scaled dot-product attention: the formula written out, and the fastest equivalent for each case.

In every mask True means that the query must not attend to the key.
Shapes: B batch, H heads, T queries, S keys, K width of a key, V width of a value, ... any leading dimensions.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .blocks import attend_in_blocks, block_size, prefers_blocks


class Attended(NamedTuple):
    """The result of attention."""

    context: Tensor
    """The context vectors (B, H, T, V)."""
    weights: Tensor | None = None
    """The attention weights (B, H, T, S) after dropout, if the caller requested them."""
    no_key: Tensor | None = None
    """With a mask: True for queries that may see no key, (..., T, 1). Their weights and context are zero."""


def causal_mask(length: int, device: torch.device | str | None = None) -> Tensor:
    """Return a boolean mask (length, length), True above the diagonal: where a key comes after the query."""
    return torch.ones(length, length, dtype=torch.bool, device=device).triu(diagonal=1)


def attend(
    query: Tensor, key: Tensor, value: Tensor, masked: Tensor | None = None, dropout_p: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return softmax(query key^T / sqrt(K)) value, and the weights (Vaswani et al. 2017, equation 1).

    (..., T, K), (..., S, K), (..., S, V) -> (..., T, V), (..., T, S). The weights are those after dropout.
    `masked` must be broadcastable to the weights. A fully masked row gives NaN.
    """
    scores = query @ key.transpose(-2, -1) / math.sqrt(key.shape[-1])  # (..., T, S)
    if masked is not None:
        scores = scores.masked_fill(masked, -torch.inf)
    weights = torch.softmax(scores, dim=-1)  # (..., T, S)
    weights = torch.dropout(weights, dropout_p, train=True)
    return weights @ value, weights  # (..., T, V)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: Tensor | None,
    masked: Tensor | None,
    dropout_p: float,
    need_weights: bool,
) -> Attended:
    """Compute `attend` by the fastest kernel: (B, H, T, K), (B, H, S, K), (B, H, S, V) -> (B, H, T, V).

    Args:
        query, key, value: where attention is causal, the queries belong to the last T of the S tokens.
        causal: the causal mask of S or more positions; None if every query may see every key.
        masked: a further boolean mask, combined with the causal one; broadcastable to (B, H, T, S).
        dropout_p: the probability that a weight is dropped.
        need_weights: whether to return the weights.
    """
    num_queries = query.shape[2]
    num_keys = key.shape[2]
    if num_queries == 1:
        causal = None  # the last token may see all keys
    if masked is None and not need_weights:
        if causal is None:
            return Attended(F.scaled_dot_product_attention(query, key, value, dropout_p=dropout_p))
        if num_queries == num_keys:
            return Attended(_causal_attention(query, key, value, causal, dropout_p))
    if causal is not None:
        later = _later_keys(causal, num_queries, num_keys)  # (1, 1, T, S)
        masked = later if masked is None else later | masked
    if masked is None:
        return Attended(*attend(query, key, value, dropout_p=dropout_p))
    return _masked_attention(query, key, value, masked, dropout_p, need_weights)


def _causal_attention(query: Tensor, key: Tensor, value: Tensor, causal: Tensor, dropout_p: float) -> Tensor:
    """Attend from each of T tokens to itself and earlier tokens: (B, H, T, V)."""
    length = query.shape[2]
    if prefers_blocks(query):
        mask = causal[:length, :length]
        return attend_in_blocks(query, key, value, mask, dropout_p, block_size(length))
    return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout_p, is_causal=True)


def _later_keys(causal: Tensor, num_queries: int, num_keys: int) -> Tensor:
    """Return the last T rows of the causal mask: (1, 1, T, S)."""
    if torch.compiler.is_exporting():  # a slice would limit the exported program to the mask's length
        positions = torch.arange(num_keys, device=causal.device)
        later = positions > positions[num_keys - num_queries :, None]  # (T, S)
    else:
        later = causal[num_keys - num_queries : num_keys, :num_keys]  # (T, S)
    return later[None, None]


def _masked_attention(
    query: Tensor, key: Tensor, value: Tensor, masked: Tensor, dropout_p: float, need_weights: bool
) -> Attended:
    """Attend under a mask. A query that may see no key gets weights and a context of zero."""
    # A softmax over no keys is 0 / 0. So such a query attends to all keys, and its result is then zeroed.
    no_key = masked.all(dim=-1, keepdim=True)  # (..., T, 1)
    masked = masked & ~no_key
    is_one_on_cpu = query.shape[2] == 1 and query.device.type == "cpu" and not torch.compiler.is_exporting()
    weights = None
    if need_weights:
        context, weights = attend(query, key, value, masked, dropout_p)
        weights = weights.masked_fill(no_key, 0.0)
    elif is_one_on_cpu:
        # This is faster. Its sums do not depend on other rows, as those of the threaded fused kernel do.
        context, _ = attend(query, key, value, masked, dropout_p)
    else:  # PyTorch's masks are True where a query attends
        context = F.scaled_dot_product_attention(query, key, value, attn_mask=~masked, dropout_p=dropout_p)
    return Attended(context.masked_fill(no_key, 0.0), weights, no_key)
