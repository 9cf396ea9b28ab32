"""Scaled dot-product attention: the formula written out, its faster equivalents, and which one runs when.

In every mask True means that the query must not attend to the key.
Shapes: B batch, H heads, T queries, S keys, K width of a key, V width of a value, ... any leading dimensions.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def causal_mask(length: int, device: torch.device | str | None = None) -> Tensor:
    """(length, length) boolean, True above the diagonal: the keys that come after the query."""
    return torch.ones(length, length, dtype=torch.bool, device=device).triu(diagonal=1)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: Tensor | None,
    masked: Tensor | None,
    dropout_p: float,
    need_weights: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """softmax(query key^T / sqrt(K)) value by the fastest kernel: (B, H, T, K), (B, H, S, K), (B, H, S, V).

    With `causal`, the causal mask of S or more positions, the queries are the last T of S. `masked`, boolean
    and broadcastable to (B, H, T, S), is added to it.

    Returns the context vectors (B, H, T, V); the weights (B, H, T, S), dropout included, if needed; and, if
    there is a mask, which queries have no key left (..., T, 1): their weights and context vectors are zero.
    """
    num_queries = query.shape[2]
    num_keys = key.shape[2]
    if masked is None and not need_weights:  # the common cases need no mask
        if causal is None or num_queries == 1:  # all keys are visible
            return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout_p), None, None
        if num_queries == num_keys and _use_blocks(query):
            mask = causal[:num_keys, :num_keys]
            # The fastest measured. A compiled loop would be bound to one length.
            block = None if torch.compiler.is_compiling() or num_keys < 256 else min(num_keys // 2, 256)
            return attend_in_blocks(query, key, value, mask, dropout_p, block), None, None
        if num_queries == num_keys:
            context = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout_p, is_causal=True)
            return context, None, None
    if causal is not None:
        if torch.compiler.is_exporting():  # a slice would bind the program to lengths below the whole mask's
            positions = torch.arange(num_keys, device=query.device)
            later = positions > positions[num_keys - num_queries :, None]  # (T, S)
        else:
            later = causal[num_keys - num_queries : num_keys, :num_keys]
        later = later[None, None]  # (1, 1, T, S)
        masked = later if masked is None else later | masked
    if masked is None:
        return *attend(query, key, value, dropout_p=dropout_p), None
    # A softmax over no keys is 0 / 0: such a query attends to all keys, and its result is set to zero.
    empty = masked.all(dim=-1, keepdim=True)  # (..., T, 1)
    masked = masked & ~empty
    weights = None
    if need_weights:
        context, weights = attend(query, key, value, masked, dropout_p)
        weights = weights.masked_fill(empty, 0.0)
    elif num_queries == 1 and query.device.type == "cpu" and not torch.compiler.is_exporting():
        # Faster, and its sums do not depend on the other rows, which the fused kernel splits over threads.
        context, _ = attend(query, key, value, masked, dropout_p)
    else:  # PyTorch's masks are True where a query attends
        context = F.scaled_dot_product_attention(query, key, value, attn_mask=~masked, dropout_p=dropout_p)
    return context.masked_fill(empty, 0.0), weights, empty


def attend(
    query: Tensor, key: Tensor, value: Tensor, masked: Tensor | None = None, dropout_p: float = 0.0
) -> tuple[Tensor, Tensor]:
    """softmax(query key^T / sqrt(K)) value, and the weights (Vaswani et al. 2017, equation 1).

    (..., T, K), (..., S, K), (..., S, V) -> (..., T, V), (..., T, S), dropout included. `masked` is
    broadcastable to the weights; a fully masked row gives NaN.
    """
    scores = query @ key.transpose(-2, -1) / math.sqrt(key.shape[-1])  # (..., T, S)
    if masked is not None:
        scores = scores.masked_fill(masked, -torch.inf)
    weights = torch.dropout(torch.softmax(scores, dim=-1), dropout_p, train=True)  # (..., T, S)
    return weights @ value, weights


def attend_in_blocks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, dropout_p: float = 0.0, block: int | None = None
) -> Tensor:
    """`attend` under the causal `mask` (T, T), in fewer passes over memory: (B, H, T, V).

    Each block of queries multiplies only the keys up to its end.
    """
    batch, heads, length, width = query.shape
    query, key, value = (x.flatten(0, 1) for x in (query, key, value))  # (B * H, T, K or V)
    bias = torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask, -torch.inf)  # (T, T)
    contexts = []
    end = 0
    for queries in torch.split(query, block, dim=1) if block else (query,):
        start = end
        end += queries.shape[1]
        keys = key[:, :end].transpose(1, 2)  # (B * H, K, end)
        scores = torch.baddbmm(bias[start:end, :end], queries, keys, alpha=1 / math.sqrt(width))
        weights = torch.softmax(scores, dim=-1).to(value.dtype)  # (B * H, block, end)
        weights = torch.dropout(weights, dropout_p, train=True)
        contexts.append(weights @ value[:, :end])  # (B * H, block, V)
    return torch.cat(contexts, dim=1).view(batch, heads, length, value.shape[2])


def _use_blocks(query: Tensor) -> bool:
    """In bfloat16 on a CPU, blocks are faster up to about a thousand tokens (docs/benchmarks.md)."""
    if torch.compiler.is_exporting():  # the program may run on another device, and with another length
        return False
    longest = 512 if torch.compiler.is_compiling() else 1024  # compiled, all queries are one block
    return query.device.type == "cpu" and query.dtype == torch.bfloat16 and query.shape[2] <= longest
