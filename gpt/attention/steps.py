"""The attention variants of the book's chapter 3, to be read in order. `multi_head.py` has the one to use.

Shapes: B batch, T tokens, D width of a token (d_in), K width of a head (d_out), H heads.
"""

import torch
from torch import Tensor, nn

from ..errors import InputError
from .kernels import attend, causal_mask


def attention_scores(x: Tensor) -> Tensor:
    """Return the dot product of each token with every token: (..., T, D) -> (..., T, T).

    There are no trainable weights yet.
    """
    return x @ x.transpose(-2, -1)


def attention_scores_by_loop(x: Tensor) -> Tensor:
    """Compute `attention_scores` one dot product at a time: (T, D) -> (T, T)."""
    return torch.stack([torch.stack([torch.dot(query, key) for key in x]) for query in x])


def normalise_by_sum(scores: Tensor) -> Tensor:
    """Divide each row by its sum: (..., T) -> (..., T). Negative scores give negative weights."""
    return scores / scores.sum(dim=-1, keepdim=True)


def softmax_naive(scores: Tensor) -> Tensor:
    """Return exp(score) / sum(exp(scores)): (..., T) -> (..., T).

    Large scores overflow, unlike in torch.softmax.
    """
    return normalise_by_sum(torch.exp(scores))


def context_vectors(weights: Tensor, x: Tensor) -> Tensor:
    """Return the weighted mean of the tokens for each query: (..., T, T), (..., T, D) -> (..., T, D)."""
    return weights @ x


def mask_by_renormalising(weights: Tensor) -> Tensor:
    """Zero the weights of later tokens and renormalise each row: (..., T, T) -> (..., T, T)."""
    keep = torch.tril(torch.ones(weights.shape[-2:], device=weights.device))  # (T, T)
    return normalise_by_sum(weights * keep)


def mask_by_infinity(scores: Tensor) -> Tensor:
    """Set the scores of later tokens to -inf, so that softmax gives them zero: (..., T, T) -> (..., T, T)."""
    return scores.masked_fill(causal_mask(scores.shape[-1], scores.device), -torch.inf)


class SelfAttention_v1(nn.Module):
    """Self-attention with trainable weights as plain parameters."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.W_query = nn.Parameter(torch.rand(d_in, d_out))
        self.W_key = nn.Parameter(torch.rand(d_in, d_out))
        self.W_value = nn.Parameter(torch.rand(d_in, d_out))

    def forward(self, x: Tensor) -> Tensor:
        """Compute the context vectors: (T, D) -> (T, K)."""
        return attend(x @ self.W_query, x @ self.W_key, x @ self.W_value)[0]


class SelfAttention_v2(nn.Module):
    """`SelfAttention_v1` with `nn.Linear`, which initialises weights better and stores them transposed."""

    def __init__(self, d_in: int, d_out: int, qkv_bias: bool = False) -> None:
        super().__init__()
        self.W_query = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = nn.Linear(d_in, d_out, bias=qkv_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the context vectors: (T, D) -> (T, K)."""
        return attend(self.W_query(x), self.W_key(x), self.W_value(x))[0]


class CausalAttention(SelfAttention_v2):
    """`SelfAttention_v2` with a batch dimension, a causal mask and dropout on the weights."""

    mask: Tensor

    def __init__(
        self, d_in: int, d_out: int, context_length: int, dropout: float, qkv_bias: bool = False
    ) -> None:
        super().__init__(d_in, d_out, qkv_bias)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("mask", causal_mask(context_length))

    def forward(self, x: Tensor) -> Tensor:
        """Compute the context vectors: (B, T, D) -> (B, T, K)."""
        masked = self.mask[: x.shape[1], : x.shape[1]]  # (T, T)
        dropout_p = self.dropout.p if self.training else 0.0
        return attend(self.W_query(x), self.W_key(x), self.W_value(x), masked, dropout_p)[0]


class MultiHeadAttentionWrapper(nn.Module):
    """Several causal heads with their own weights and masks; their outputs are concatenated."""

    def __init__(
        self,
        d_in: int,
        d_out: int,
        context_length: int,
        dropout: float,
        num_heads: int,
        qkv_bias: bool = False,
    ) -> None:
        super().__init__()
        self.heads = nn.ModuleList(
            CausalAttention(d_in, d_out, context_length, dropout, qkv_bias) for _ in range(num_heads)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Compute the context vectors: (B, T, D) -> (B, T, H * K)."""
        return torch.cat([head(x) for head in self.heads], dim=-1)


def scores_of_heads(query: Tensor, key: Tensor) -> Tensor:
    """Return all heads' scores in one batched matrix product: (B, H, T, K), (B, H, T, K) -> (B, H, T, T)."""
    return query @ key.transpose(2, 3)


class MultiHeadAttn(nn.Module):
    """Multi-head attention with query, key and value fused in one projection, and no output projection."""

    bias: Tensor

    def __init__(self, n_embd: int, block_size: int, n_heads: int) -> None:
        super().__init__()
        if n_heads < 1 or n_embd % n_heads:
            raise InputError(f"n_embd {n_embd} is not divisible by n_heads {n_heads}")
        self.n_heads = n_heads
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        # 1 where a query attends, as in GPT-2's checkpoints. This is the opposite of the other variants.
        self.register_buffer("bias", torch.tril(torch.ones(1, 1, block_size, block_size)))

    def forward(self, x: Tensor) -> Tensor:
        """Compute the context vectors: (B, T, H * K) -> (B, T, H * K)."""
        num_tokens, n_embd = x.shape[1:]
        query, key, value = (
            part.unflatten(2, (self.n_heads, -1)).transpose(1, 2)  # (B, H, T, K)
            for part in self.c_attn(x).split(n_embd, dim=2)  # (B, T, H * K) each
        )
        context, _ = attend(query, key, value, self.bias[:, :, :num_tokens, :num_tokens] == 0)
        return context.transpose(1, 2).flatten(2)
