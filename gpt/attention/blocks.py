"""Causal attention, computed one block of queries at a time. This is the fastest way in bfloat16 on a CPU.

A causal mask hides half of the score matrix. Each block of queries multiplies only the keys up to its own
end, so most of that half is never computed. Two batched products per block read and write memory fewer times
than PyTorch's kernel.

Shapes: B batch, H heads, T tokens, K width of a key, V width of a value, R queries of a block, E keys up to
the end of a block.
"""

import math

import torch
from torch import Tensor

_LONGEST = 1024  # tokens: above that, PyTorch's kernel is faster (docs/benchmarks.md)
_LONGEST_COMPILED = 512  # a compiled program takes all queries as one block
_SHORTEST_DIVIDED = 256  # tokens: below that, one block is faster than several
_LARGEST_BLOCK = 256  # queries


def prefers_blocks(query: Tensor) -> bool:
    """Whether attention in blocks is faster than PyTorch's kernel for queries (B, H, T, K)."""
    if torch.compiler.is_exporting():  # the exported program may run on another device, at another length
        return False
    longest = _LONGEST_COMPILED if torch.compiler.is_compiling() else _LONGEST
    return query.device.type == "cpu" and query.dtype == torch.bfloat16 and query.shape[2] <= longest


def block_size(length: int) -> int | None:
    """Return the number of queries in a block; None puts all of them into one block."""
    # torch.compile would specialise a loop over blocks to one length.
    if torch.compiler.is_compiling() or length < _SHORTEST_DIVIDED:
        return None
    return min(length // 2, _LARGEST_BLOCK)


def attend_in_blocks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, dropout_p: float = 0.0, block: int | None = None
) -> Tensor:
    """Compute the context vectors of `attend` under the causal `mask` (T, T), block by block.

    (B, H, T, K), (B, H, T, K), (B, H, T, V) -> (B, H, T, V).

    `block` is the number of queries in a block. By default one block holds all of them.
    """
    batch, heads, length, key_width = query.shape
    query, key, value = (x.flatten(0, 1) for x in (query, key, value))  # (B * H, T, K or V)
    bias = torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask, -torch.inf)  # (T, T)
    contexts = []
    end = 0
    for queries in torch.split(query, block or length, dim=1):  # (B * H, R, K)
        start = end
        end += queries.shape[1]
        keys = key[:, :end].transpose(1, 2)  # (B * H, K, E)
        scores = torch.baddbmm(bias[start:end, :end], queries, keys, alpha=1 / math.sqrt(key_width))
        weights = torch.softmax(scores, dim=-1).to(value.dtype)  # (B * H, R, E)
        weights = torch.dropout(weights, dropout_p, train=True)
        contexts.append(weights @ value[:, :end])  # (B * H, R, V)
    return torch.cat(contexts, dim=1).view(batch, heads, length, value.shape[2])
