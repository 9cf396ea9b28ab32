"""Scaled dot-product attention: the formula written out, and the fastest equivalent for each case.

In every mask True means that the query must not attend to the key.
Shapes: B batch, H heads, T queries, S keys, K width of a key, V width of a value, ... any leading dimensions.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

_LONGEST = 1024  # tokens: above that, PyTorch's kernel is faster than blocks (docs/log/step.md)
_LONGEST_COMPILED = 512  # a compiled program takes all queries as one block
_SHORTEST_DIVIDED = 256  # tokens: below that, one block is faster than several
_LARGEST_BLOCK = 256  # queries


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
    if _prefers_blocks(query):
        return attend_in_blocks(query, key, value, causal[:length, :length], dropout_p, _block_size(length))
    return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout_p, is_causal=True)


def _prefers_blocks(query: Tensor) -> bool:
    """Whether `attend_in_blocks` is faster than PyTorch's kernel for queries (B, H, T, K)."""
    if torch.compiler.is_exporting():  # the exported program may run on another device, at another length
        return False
    longest = _LONGEST_COMPILED if torch.compiler.is_compiling() else _LONGEST
    return query.device.type == "cpu" and query.dtype == torch.bfloat16 and query.shape[2] <= longest


def _block_size(length: int) -> int:
    """Return the number of queries in a block."""
    # torch.compile would specialise a loop over blocks to one length.
    if torch.compiler.is_compiling() or length < _SHORTEST_DIVIDED:
        return length
    return min(length // 2, _LARGEST_BLOCK)


def attend_in_blocks(
    query: Tensor, key: Tensor, value: Tensor, masked: Tensor, dropout_p: float, block: int
) -> Tensor:
    """Compute the context vectors of `attend` under the causal mask (T, T), R queries at a time.

    (B, H, T, K), (B, H, T, K), (B, H, T, V) -> (B, H, T, V).

    This is the fastest way in bfloat16 on a CPU. Each block multiplies only the keys up to its own end, E of
    them, so most of what the mask hides is never computed. Two batched products per block read and write
    memory fewer times than PyTorch's kernel.
    """
    batch, heads, length, key_width = query.shape
    query, key, value = (x.flatten(0, 1) for x in (query, key, value))  # (B * H, T, K or V)
    bias = torch.zeros_like(masked, dtype=query.dtype).masked_fill(masked, -torch.inf)  # (T, T)
    contexts = []
    end = 0
    for queries in torch.split(query, block, dim=1):  # (B * H, R, K)
        start = end
        end += queries.shape[1]
        keys = key[:, :end].transpose(1, 2)  # (B * H, K, E)
        scores = torch.baddbmm(bias[start:end, :end], queries, keys, alpha=1 / math.sqrt(key_width))
        weights = torch.softmax(scores, dim=-1).to(value.dtype)  # (B * H, R, E)
        weights = torch.dropout(weights, dropout_p, train=True)
        contexts.append(weights @ value[:, :end])  # (B * H, R, V)
    return torch.cat(contexts, dim=1).view(batch, heads, length, value.shape[2])


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
