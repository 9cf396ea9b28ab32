"""Causal multi-head attention with weight splits: the module inside the GPT.

Shapes: B batch, T tokens, H heads, K width of a head (d_out = H * K).
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt.errors import InputError


class MultiHeadAttention(nn.Module):
    """Causal multi-head self-attention (Vaswani et al. 2017, section 3.2.2).

    Raises:
        InputError: `num_heads` does not divide `d_out`.
    """

    mask: Tensor

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
        if d_out % num_heads:
            raise InputError(f"d_out {d_out} is not divisible by num_heads {num_heads}")
        self.d_out = d_out
        self.num_heads = num_heads
        self.head_dim = d_out // num_heads
        self.W_query = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.out_proj = nn.Linear(d_out, d_out)
        self.dropout = nn.Dropout(dropout)
        # True where a query must not look. Rebuilt from context_length, so no state dict carries it.
        mask = torch.ones(context_length, context_length, dtype=torch.bool).triu(diagonal=1)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor, need_weights: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """(B, T, d_in) -> (B, T, d_out), and with `need_weights` the weights (B, H, T, T) too."""
        query, key, value = (self._split(W(x)) for W in (self.W_query, self.W_key, self.W_value))
        if not need_weights:
            dropout = self.dropout.p if self.training else 0.0
            context = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
            return self.out_proj(self._join(context))
        num_tokens = x.shape[1]
        scores = query @ key.transpose(2, 3) / math.sqrt(self.head_dim)  # (B, H, T, T)
        scores = scores.masked_fill(self.mask[:num_tokens, :num_tokens], -torch.inf)
        weights = self.dropout(torch.softmax(scores, dim=-1))  # (B, H, T, T)
        return self.out_proj(self._join(weights @ value)), weights

    def _split(self, x: Tensor) -> Tensor:
        """(B, T, H * K) -> (B, H, T, K)."""
        return x.view(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)

    def _join(self, x: Tensor) -> Tensor:
        """(B, H, T, K) -> (B, T, H * K)."""
        return x.transpose(1, 2).flatten(2)
