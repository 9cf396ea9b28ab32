"""Causal multi-head attention with weight splits: the module inside the GPT, for any PyTorch model.

In every mask True means that the query must not attend to the key, as in `torch.nn.MultiheadAttention`.
(`torch.nn.functional.scaled_dot_product_attention` means the opposite.)

Shapes: B batch, T tokens given, S keys (the cached tokens, then the T given; without a cache S = T), H heads,
K width of a head (d_out = H * K).
"""

import operator
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from gpt.attention.cache import KeyValueCache
from gpt.attention.kernels import attention, causal_mask
from gpt.errors import InputError


class MultiHeadAttention(nn.Module):
    """Causal multi-head self-attention (Vaswani et al. 2017, section 3.2.2).

    Args:
        d_in: width of the input tokens.
        d_out: width of the output tokens, shared evenly by the heads.
        context_length: the most tokens a query can attend to, itself included.
        dropout: probability that an attention weight is dropped while training.
        num_heads: number of heads; must divide `d_out`.
        qkv_bias: whether the query, key and value projections have a bias.

    Raises:
        InputError: a size below one, or `num_heads` does not divide `d_out`.
        ValueError: `dropout` is outside [0, 1].
    """

    mask: Tensor
    """(context_length, context_length) boolean, the causal mask. It is rebuilt, not saved in state dicts."""

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
        for name, size in (("d_in", d_in), ("d_out", d_out), ("context_length", context_length)):
            if size < 1:
                raise InputError(f"{name} must be at least 1, got {size}")
        if num_heads < 1 or d_out % num_heads:
            raise InputError(f"d_out {d_out} is not divisible by num_heads {num_heads}")
        self.d_in, self.d_out, self.context_length = d_in, d_out, context_length
        self.num_heads, self.head_dim = num_heads, d_out // num_heads
        self.W_query = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.out_proj = nn.Linear(d_out, d_out)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("mask", causal_mask(context_length), persistent=False)

    def forward(
        self,
        x: Tensor,
        *,
        need_weights: bool = False,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend from each of T tokens to itself and those before it: (B, T, d_in) -> (B, T, d_out).

        A token that can attend to no key, not even to itself, gives zeros, and its gradient is zero.

        Args:
            x: (B, T, d_in).
            need_weights: also return the weights, which takes the slower kernel that writes them out.
            key_padding_mask: (B, S) boolean, True for keys that are padding, on either side.
            attn_mask: (T, S), (B, T, S) or (B, H, T, S) boolean, added to the causal mask.
            document_ids: (B, S) integers; a query attends to keys of its own document only.
            cache: the tokens before `x`, from `new_cache`; `x` is appended to it.

        Returns:
            The output, and with `need_weights` a pair of it and the weights (B, H, T, S), dropout included.

        Raises:
            InputError: a tensor of another shape or type than above, more tokens than the context or the
                cache can hold, or a cache of another batch size. The cache is then unchanged.
        """
        num_keys = self._count_keys(x, cache)
        masked = self._combine_masks(x, num_keys, key_padding_mask, attn_mask, document_ids)
        query, key, value = (self._split(projected) for projected in self.project(x))  # (B, H, T, K)
        if cache is not None:
            key, value = cache.update(key, value)  # (B, H, S, K)
        dropout_p = self.dropout.p if self.training else 0.0
        # softmax(QK^T / sqrt(K)) V: (B, H, T, K)
        context, weights, empty = attention(query, key, value, self.mask, masked, dropout_p, need_weights)
        out: Tensor = self.out_proj(self._join(context))  # (B, T, d_out)
        if empty is not None:  # a token with no key in any head gives zeros, without the bias
            out = out.masked_fill(empty.all(dim=-3), 0.0)
        return out if weights is None else (out, weights)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of all heads side by side: (B, T, d_in) -> (B, T, d_out) each."""
        return self.W_query(x), self.W_key(x), self.W_value(x)

    def new_cache(
        self, batch_size: int, max_length: int | None = None, dtype: torch.dtype | None = None
    ) -> KeyValueCache:
        """An empty cache for this layer, on its device.

        Args:
            batch_size: B of the tokens to come.
            max_length: the most tokens it can hold; the context length by default.
            dtype: the weights' by default; under autocast give the type that autocast computes in.

        Raises:
            InputError: `max_length` is over the context length.
        """
        length = self.context_length if max_length is None else max_length
        if length > self.context_length:
            raise InputError(
                f"a cache of {length} tokens is more than the context_length {self.context_length}"
            )
        weight = self.W_key.weight
        return KeyValueCache(
            batch_size,
            self.num_heads,
            length,
            self.head_dim,
            device=weight.device,
            dtype=dtype or weight.dtype,
        )

    def _split(self, x: Tensor) -> Tensor:
        """(B, T, H * K) -> (B, H, T, K)."""
        return x.view(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)

    def _join(self, x: Tensor) -> Tensor:
        """(B, H, T, K) -> (B, T, H * K)."""
        return x.transpose(1, 2).flatten(2)

    def _count_keys(self, x: Tensor, cache: KeyValueCache | None) -> int:
        """S, after checking the shapes."""
        if x.dim() != 3 or x.shape[2] != self.d_in:
            expected = f"(batch, tokens, {self.d_in})"
            raise InputError(f"expected an input of shape {expected}, got {tuple(x.shape)}")
        cached = 0
        if cache is not None:
            cache.check((x.shape[0], self.num_heads, x.shape[1], self.head_dim))
            cached = cache.length
        if cached + x.shape[1] > self.context_length:
            expected = f"at most context_length {self.context_length} tokens"
            given = f"an input of shape {tuple(x.shape)}" + (
                f" after {cached} cached tokens" if cached else ""
            )
            raise InputError(f"expected {expected}, got {given}")
        return cached + x.shape[1]

    def _combine_masks(
        self,
        x: Tensor,
        num_keys: int,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        document_ids: Tensor | None,
    ) -> Tensor | None:
        """The given masks as one, broadcastable to (B, H, T, S); None if there are none."""
        batch, num_tokens, _ = x.shape
        keys, pairs = (batch, num_keys), (num_tokens, num_keys)
        masks = []
        if key_padding_mask is not None:
            _check_mask("key_padding_mask", key_padding_mask, [keys])
            masks.append(key_padding_mask[:, None, None, :])  # (B, 1, 1, S)
        if attn_mask is not None:
            _check_mask("attn_mask", attn_mask, [pairs, (batch, *pairs), (batch, self.num_heads, *pairs)])
            masks.append(attn_mask[:, None] if attn_mask.dim() == 3 else attn_mask)
        if document_ids is not None:
            if document_ids.shape != keys or document_ids.is_floating_point():
                given = f"{document_ids.dtype} of shape {tuple(document_ids.shape)}"
                raise InputError(f"expected integer document_ids of shape {keys}, got {given}")
            own = document_ids[:, num_keys - num_tokens :]  # (B, T)
            masks.append((own[:, :, None] != document_ids[:, None, :])[:, None])  # (B, 1, T, S)
        return reduce(operator.or_, masks) if masks else None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "MultiHeadAttention":
        """Called by `.to` and the like. `.to_empty` leaves garbage, so a mask that moved is rebuilt."""
        before = self.mask
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.mask is not before:
            self.mask = causal_mask(self.context_length, self.mask.device)
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Ignore the float `mask` that the chapter's own module saves."""
        state_dict.pop(prefix + "mask", None)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        weight = state_dict.get(prefix + "W_query.weight", self.mask)
        if self.mask.is_meta and not weight.is_meta:  # load_state_dict(assign=True) into a model on meta
            self.mask = causal_mask(self.context_length, weight.device)


def _check_mask(name: str, mask: Tensor, shapes: list[tuple[int, ...]]) -> None:
    if mask.dtype != torch.bool or tuple(mask.shape) not in shapes:
        expected = " or ".join(str(shape) for shape in shapes)
        given = f"{mask.dtype} of shape {tuple(mask.shape)}"
        raise InputError(f"expected a boolean {name} of shape {expected}, got {given}")
