"""Multi-head attention with weight splits. The GPT uses this module, and any other PyTorch model can.

In every mask True means that the query must not attend to the key, as in `torch.nn.MultiheadAttention`.
Shapes: B batch, T tokens of the input, S keys (the cached tokens and then the input's, or the context's
tokens), H heads, K width of a head (d_out = H * K).
"""

import torch
from torch import Tensor, nn

from ..errors import InputError, check_least
from .cache import KeyValueCache
from .kernels import attention, causal_mask


class MultiHeadAttention(nn.Module):
    """Multi-head attention (Vaswani et al. 2017, section 3.2.2), causal self-attention by default.

    Args:
        d_in: width of the input tokens.
        d_out: width of the output tokens, shared evenly by the heads.
        context_length: the most keys a query can attend to, itself included.
        dropout: probability that an attention weight is dropped while training.
        num_heads: number of heads; must divide `d_out`.
        qkv_bias: whether the query, key and value projections have a bias.
        causal: whether a token attends only to itself and earlier tokens; False for encoders and for
            cross-attention.
        mask: a causal mask (context_length, context_length) that several causal layers share. Its creator
            must restore it after weights are loaded. By default each layer makes its own.

    Raises:
        ValueError: a size below one, heads that do not divide `d_out`, a dropout outside [0, 1], or a mask
            without `causal`.
    """

    mask: Tensor | None
    """The boolean causal mask (context_length, context_length); None if not causal. No state dict has it."""

    def __init__(
        self,
        d_in: int,
        d_out: int,
        context_length: int,
        dropout: float,
        num_heads: int,
        qkv_bias: bool = False,
        causal: bool = True,
        *,
        mask: Tensor | None = None,
    ) -> None:
        super().__init__()
        check_least(1, d_in=d_in, d_out=d_out, context_length=context_length)
        if num_heads < 1 or d_out % num_heads:
            raise InputError(f"d_out {d_out} is not divisible by num_heads {num_heads}")
        if mask is not None and not causal:
            raise InputError(
                "a mask that layers share is for causal=True: give others to forward as attn_mask"
            )
        self.d_in = d_in
        self.d_out = d_out
        self.context_length = context_length
        self.num_heads = num_heads
        self.head_dim = d_out // num_heads
        self.W_query = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.out_proj = nn.Linear(d_out, d_out)
        self.dropout = nn.Dropout(dropout)
        self.register_load_state_dict_pre_hook(_without_mask)  # type: ignore[no-untyped-call]
        if causal and mask is None:
            mask = causal_mask(context_length)
            self.register_load_state_dict_post_hook(_with_new_mask)  # type: ignore[no-untyped-call]
        self.register_buffer("mask", mask, persistent=False)

    def forward(
        self,
        x: Tensor,
        *,
        context: Tensor | None = None,
        need_weights: bool = False,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend from each of T tokens to the keys it may see: (B, T, d_in) -> (B, T, d_out).

        A token that can attend to no key gives zeros. Its gradient is zero too.

        Args:
            x: (B, T, d_in).
            context: (B, S, d_in), the tokens to attend to, by default `x`. It needs causal=False.
            need_weights: also return the weights (B, H, T, S) after dropout. This takes a slower kernel.
            key_padding_mask: (B, S) boolean, True for keys that are padding, on either side.
            attn_mask: (T, S), (B, T, S) or (B, H, T, S) boolean, combined with the causal mask.
            cache: the keys and values of the tokens before `x`, from `new_cache`. Those of `x` are appended.

        Raises:
            InputError: a tensor of another shape or type, more keys than the context length or the cache can
                hold, or arguments that exclude each other. The cache is then unchanged.
        """
        num_keys = self._count_keys(x, context, cache)
        masked = self._combine_masks(x, num_keys, key_padding_mask, attn_mask)
        keys = x if context is None else context
        query = self._split(self.W_query(x))  # (B, H, T, K)
        key = self._split(self.W_key(keys))  # (B, H, S, K)
        value = self._split(self.W_value(keys))  # (B, H, S, K)
        if cache is not None:
            key, value = cache.update(key, value)  # (B, H, S, K)
        dropout_p = self.dropout.p if self.training else 0.0
        # Scores, masks, softmax, dropout: (B, H, T, K)
        vectors, weights, no_key = attention(query, key, value, self.mask, masked, dropout_p, need_weights)
        out: Tensor = self.out_proj(vectors.transpose(1, 2).flatten(2))  # heads side by side, (B, T, d_out)
        if no_key is not None:  # a token with no key in any head gives zeros, without the bias
            out = out.masked_fill(no_key.all(dim=-3), 0.0)
        return out if weights is None else (out, weights)

    def new_cache(
        self, batch_size: int, max_length: int | None = None, dtype: torch.dtype | None = None
    ) -> KeyValueCache:
        """Make an empty cache on this layer's device for `max_length` tokens, by default the context length.

        By default it has the type of the weights. Under autocast, give the type that autocast computes in.
        Raises InputError if the layer is not causal.
        """
        if self.mask is None:
            raise InputError("a cache needs causal=True: without it earlier tokens attend to later ones")
        shape = (batch_size, self.num_heads, max_length or self.context_length, self.head_dim)
        dtype = dtype or self.out_proj.weight.dtype
        return KeyValueCache(*shape, device=self.mask.device, dtype=dtype)

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)  # (B, H, T, K)

    def _count_keys(self, x: Tensor, context: Tensor | None, cache: KeyValueCache | None) -> int:
        """Check the shapes and return S, the number of keys."""
        keys = x if context is None else context
        for name, tokens, batch in (("an input", x, "batch"), ("a context", keys, x.shape[0])):
            if tokens.dim() != 3 or tokens.shape[2] != self.d_in or tokens.shape[0] != x.shape[0]:
                expected = f"{name} of shape ({batch}, tokens, {self.d_in})"
                raise InputError(f"expected {expected}, got {tuple(tokens.shape)}")
        if context is not None and self.mask is not None:
            raise InputError("a context needs attention with causal=False")
        count = keys.shape[1]
        if cache is not None:
            cache.check((x.shape[0], self.num_heads, x.shape[1], self.head_dim))
            count += cache.length
        if count > self.context_length:
            raise InputError(f"expected at most context_length {self.context_length} tokens, got {count}")
        return count

    def _combine_masks(
        self, x: Tensor, num_keys: int, padding: Tensor | None, mask: Tensor | None
    ) -> Tensor | None:
        """Combine the given masks into one, broadcastable to (B, H, T, S); None if there are none."""
        batch, num_tokens, _ = x.shape
        if padding is not None:
            _check("key_padding_mask", padding, (batch, num_keys))
            padding = padding[:, None, None, :]  # (B, 1, 1, S)
        if mask is not None:
            pairs = num_tokens, num_keys
            _check("attn_mask", mask, pairs, (batch, *pairs), (batch, self.num_heads, *pairs))
            while mask.dim() < 4:
                mask = mask.unsqueeze(-3)  # (1 or B, 1, T, S)
        if mask is None or padding is None:
            return padding if mask is None else mask
        return mask | padding


def _without_mask(module: nn.Module, state_dict: dict[str, object], prefix: str, *_: object) -> None:
    """Ignore the float `mask` that the book's own module saves in its state dict."""
    state_dict.pop(prefix + "mask", None)


def _with_new_mask(module: nn.Module, _: object) -> None:
    """Compute the mask again after weights are loaded, because `.to_empty` leaves garbage in it."""
    assert isinstance(module, MultiHeadAttention)
    module.mask = causal_mask(module.context_length, module.out_proj.weight.device)


def _check(name: str, mask: Tensor, *shapes: tuple[int, ...]) -> None:
    if mask.dtype != torch.bool or tuple(mask.shape) not in shapes:
        expected = f"boolean {name} of shape {' or '.join(map(str, shapes))}"
        raise InputError(f"expected {expected}, got {mask.dtype} of shape {tuple(mask.shape)}")
