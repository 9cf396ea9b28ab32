"""Causal multi-head attention with weight splits: the module inside the GPT, for any PyTorch model.

Every mask here means the same: True where a query must not look, as in `torch.nn.MultiheadAttention`.
(`torch.nn.functional.scaled_dot_product_attention` means the opposite by True.)

Shapes: B batch, T tokens given, S keys (the cached tokens, then the T given; without a cache S = T), H heads,
K width of a head (d_out = H * K).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt.attention.cache import KeyValueCache
from gpt.attention.kernels import attend, attend_in_blocks, causal_mask
from gpt.errors import InputError


class MultiHeadAttention(nn.Module):
    """Causal multi-head self-attention (Vaswani et al. 2017, section 3.2.2).

    Args:
        d_in: width of the tokens that come in.
        d_out: width of what goes out, shared evenly by the heads.
        context_length: the most tokens a query may look back on, itself included.
        dropout: probability that an attention weight is dropped while training.
        num_heads: how many heads; must divide `d_out`.
        qkv_bias: whether the query, key and value projections have a bias.

    Raises:
        InputError: a size below one, or `num_heads` does not divide `d_out`.
        ValueError: `dropout` is outside [0, 1].
    """

    mask: Tensor
    """(context_length, context_length) boolean. Rebuilt from its length, so no state dict carries it."""

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
        self.d_in, self.d_out = d_in, d_out
        self.num_heads = num_heads
        self.head_dim = d_out // num_heads
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

        A token that nothing lets look at any key, itself included, gives zeros, and its gradient is zero.

        Args:
            x: (B, T, d_in).
            need_weights: also return the weights, which takes the slower path that writes them out.
            key_padding_mask: (B, S) boolean, True for keys that are padding, on either side.
            attn_mask: (T, S), (B, T, S) or (B, H, T, S) boolean, True where a query must not look; added to
                the causal mask.
            document_ids: (B, S) integers; a query looks at keys of its own document only.
            cache: the tokens before `x`, from `new_cache`; `x` is appended to it.

        Returns:
            The output, and with `need_weights` a pair of it and the weights (B, H, T, S), dropout included.

        Raises:
            InputError: a tensor of another shape or type than above, more tokens than the context or than the
                cache has room for, or a cache of another batch size. The cache is then as it was.
        """
        num_tokens, num_keys = x.shape[1], self._num_keys(x, cache)
        extra = self._combine(x, num_keys, key_padding_mask, attn_mask, document_ids)
        query, key, value = (self._split(projected) for projected in self.project(x))  # (B, H, T, K)
        if cache is not None:
            key, value = cache.update(key, value)  # (B, H, S, K)
        dropout = self.dropout.p if self.training else 0.0

        # The common cases need no mask built: a whole sequence, and one token that looks at all before it.
        if extra is None and not need_weights and (num_tokens == num_keys or num_tokens == 1):
            causal = bool(num_tokens > 1)  # in torch.export the comparison is a symbol
            if causal and _blocks_pay(query):
                mask = self.mask[:num_tokens, :num_tokens]
                context = attend_in_blocks(query, key, value, mask, dropout, _block(num_tokens))
            else:
                context = F.scaled_dot_product_attention(
                    query, key, value, dropout_p=dropout, is_causal=causal
                )
            out: Tensor = self.out_proj(self._join(context))  # (B, T, d_out)
            return out

        hidden = self.mask[None, None, num_keys - num_tokens : num_keys, :num_keys]  # (1, 1, T, S)
        if extra is not None:
            hidden = hidden | extra  # (B or 1, H or 1, T, S)
        # A softmax over nothing is 0 / 0: a row without keys looks at all of them, and loses what it saw.
        blind = hidden.all(dim=-1, keepdim=True)  # (B or 1, H or 1, T, 1)
        hidden = hidden & ~blind
        if need_weights or _one_query(query):
            context, weights = attend(query, key, value, hidden, self.dropout)  # (B, H, T, K), (B, H, T, S)
            weights = weights.masked_fill(blind, 0.0)
        else:
            context = F.scaled_dot_product_attention(query, key, value, attn_mask=~hidden, dropout_p=dropout)
        out = self.out_proj(self._join(context.masked_fill(blind, 0.0)))  # (B, T, d_out)
        out = out.masked_fill(blind.all(dim=1), 0.0)
        return (out, weights) if need_weights else out

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of all heads side by side: (B, T, d_in) -> (B, T, d_out) each."""
        return self.W_query(x), self.W_key(x), self.W_value(x)

    def new_cache(
        self, batch_size: int, max_length: int | None = None, dtype: torch.dtype | None = None
    ) -> KeyValueCache:
        """An empty cache for this layer, on its device.

        Args:
            batch_size: B of the tokens to come.
            max_length: the most tokens it will hold; the context length if left out.
            dtype: the weights' if left out; under autocast give the type that autocast computes in.

        Raises:
            InputError: `max_length` is over the context length.
        """
        context_length = self.mask.shape[0]
        max_length = context_length if max_length is None else max_length
        if max_length > context_length:
            raise InputError(
                f"a cache of {max_length} tokens is more than the context_length {context_length}"
            )
        weight = self.W_key.weight
        return KeyValueCache(
            batch_size,
            self.num_heads,
            max_length,
            self.head_dim,
            device=weight.device,
            dtype=weight.dtype if dtype is None else dtype,
        )

    def _split(self, x: Tensor) -> Tensor:
        """(B, T, H * K) -> (B, H, T, K)."""
        return x.view(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)

    def _join(self, x: Tensor) -> Tensor:
        """(B, H, T, K) -> (B, T, H * K)."""
        return x.transpose(1, 2).flatten(2)

    def _num_keys(self, x: Tensor, cache: KeyValueCache | None) -> int:
        """S, after a look at the shapes."""
        if x.dim() != 3 or x.shape[2] != self.d_in:
            expected = f"(batch, tokens, {self.d_in})"
            raise InputError(f"expected an input of shape {expected}, got {tuple(x.shape)}")
        cached = 0
        if cache is not None:
            cache.check((x.shape[0], self.num_heads, x.shape[1], self.head_dim))
            cached = cache.length
        num_keys = cached + x.shape[1]
        if num_keys > self.mask.shape[0]:
            before = f" after {cached} cached ones" if cached else ""
            raise InputError(
                f"expected at most context_length {self.mask.shape[0]} tokens, "
                f"got an input of shape {tuple(x.shape)}{before}"
            )
        return num_keys

    def _combine(
        self,
        x: Tensor,
        num_keys: int,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        document_ids: Tensor | None,
    ) -> Tensor | None:
        """What the masks given hide beside later tokens: (B or 1, H or 1, T, S), or None without masks."""
        batch, num_tokens, _ = x.shape
        hidden = None
        if key_padding_mask is not None:
            _check_mask("key_padding_mask", key_padding_mask, [(batch, num_keys)])
            hidden = key_padding_mask[:, None, None, :]  # (B, 1, 1, S)
        if attn_mask is not None:
            pairs = (num_tokens, num_keys)
            _check_mask("attn_mask", attn_mask, [pairs, (batch, *pairs), (batch, self.num_heads, *pairs)])
            if attn_mask.dim() == 3:
                attn_mask = attn_mask[:, None]  # (B, 1, T, S)
            hidden = attn_mask if hidden is None else hidden | attn_mask
        if document_ids is not None:
            if document_ids.shape != (batch, num_keys) or document_ids.is_floating_point():
                raise InputError(
                    f"expected integer document_ids of shape {(batch, num_keys)}, "
                    f"got {document_ids.dtype} of shape {tuple(document_ids.shape)}"
                )
            own = document_ids[:, num_keys - num_tokens :]  # (B, T)
            other = (own[:, :, None] != document_ids[:, None, :])[:, None]  # (B, 1, T, S)
            hidden = other if hidden is None else hidden | other
        return hidden

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "MultiHeadAttention":
        """What `.to` and its like call. `.to_empty` leaves garbage, so a mask that moved is rebuilt."""
        before = self.mask
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.mask is not before:
            self.mask = causal_mask(len(before), self.mask.device)
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Load as ever, but pass over the float `mask` that the chapter's own module saves."""
        state_dict.pop(prefix + "mask", None)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        weight = state_dict.get(prefix + "W_query.weight", self.mask)
        if (
            self.mask.is_meta and not weight.is_meta
        ):  # load_state_dict(assign=True) into a model without memory
            self.mask = causal_mask(len(self.mask), weight.device)


def _blocks_pay(query: Tensor) -> bool:
    """Whether plain products beat PyTorch's fused attention; see `attend_in_blocks`."""
    if torch.compiler.is_exporting():  # the program may run on another device, and with another length
        return False
    longest = 512 if torch.compiler.is_compiling() else 1024  # compiled, all queries are one block
    return query.device.type == "cpu" and query.dtype == torch.bfloat16 and query.shape[2] <= longest


def _one_query(query: Tensor) -> bool:
    """Whether to write attention out because there is but one query: decoding, one token a row.

    On a CPU that is the faster way, and the only one whose sums do not depend on the rows beside a row: the
    fused kernel adds up in an order that differs with the thread a row falls to.
    """
    return query.shape[2] == 1 and query.device.type == "cpu" and not torch.compiler.is_exporting()


def _block(num_tokens: int) -> int | None:
    """How many queries at a time: the fastest measured. A compiled loop would hold for one length only."""
    if torch.compiler.is_compiling() or num_tokens < 256:
        return None
    return min(num_tokens // 2, 256)


def _check_mask(name: str, mask: Tensor, shapes: list[tuple[int, ...]]) -> None:
    if mask.dtype != torch.bool or tuple(mask.shape) not in shapes:
        expected = " or ".join(str(shape) for shape in shapes)
        raise InputError(
            f"expected a boolean {name} of shape {expected}, got {mask.dtype} of shape {tuple(mask.shape)}"
        )
