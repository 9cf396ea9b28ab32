"""The keys and values of earlier tokens. They are kept, so a new token costs the work of one token only.

Shapes: B batch, H heads, L capacity in tokens, S tokens held so far, T new tokens, K width of a head.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import InputError


class KeyValueCache:
    """The keys and values of one attention layer, in memory that is allocated once.

    `length` is the number of tokens held. The caller pads shorter prompts on the left and masks the padding.
    """

    def __init__(
        self,
        batch_size: int,
        num_heads: int,
        max_length: int,
        head_dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        shape = (batch_size, num_heads, max_length, head_dim)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)  # (B, H, L, K)
        self.values = torch.zeros_like(self.keys)  # (B, H, L, K)
        self.length = 0

    def update(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append T tokens, (B, H, T, K) each. Return all tokens held, (B, H, S, K) each.

        Raises InputError as `check` does.
        """
        self.check(key.shape)
        end = self.length + key.shape[2]
        self.keys[:, :, self.length : end] = key
        self.values[:, :, self.length : end] = value
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def check(self, shape: Sequence[int]) -> None:
        """Raise InputError unless new keys of this shape (B, H, T, K) fit."""
        batch_size, num_heads, max_length, head_dim = self.keys.shape
        if tuple(shape) != (batch_size, num_heads, shape[2], head_dim):
            expected = f"({batch_size}, {num_heads}, T, {head_dim})"
            raise InputError(f"the cache expected keys of shape {expected}, got {tuple(shape)}")
        if self.length + shape[2] > max_length:
            held = f"holds {self.length} of at most {max_length} tokens"
            raise InputError(f"the cache {held}, {shape[2]} more do not fit")
