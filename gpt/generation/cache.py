"""Keys and values of texts that differ in length and come and go: continuous batching needs it.

The tokens of a row are in its columns 0, 1, ..., so no padding is stored, a token's column is its position,
and rows that come or go do not move the tokens of others. Columns past a row's end are masked.

Shapes: N rows, H heads, S columns attended to, L columns allocated, T new tokens, K width of a head.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from gpt.attention import KeyValueCache
from gpt.config import GPTConfig
from gpt.generation.graphs import Recordings

_BLOCK = 64  # columns are allocated in multiples of it


class Read(NamedTuple):
    """Tokens to read after those that a row holds already; their keys and values are added to it."""

    row: int
    held: int  # how many tokens the row holds
    tokens: Sequence[int]
    scored: int = 1  # how many of the last tokens the logits are computed of


class Cache:
    """Memory (layers, 2, N, H, L, K) for rows of keys and values, of the device and type of `like`."""

    def __init__(self, config: GPTConfig, like: Tensor) -> None:
        self.context_length = config.context_length
        columns, width = min(_BLOCK, config.context_length), config.emb_dim // config.num_heads
        self.store = like.new_zeros(config.num_layers, 2, 1, config.num_heads, columns, width)
        self.recorded: Recordings = {}  # steps on this memory

    def reserve(self, rows: int, columns: int) -> None:
        """Have memory for so many, or for twice what it was: all is copied, longer than a step takes."""
        held_rows, held_columns = self.store.shape[2], self.store.shape[4]
        more_rows = max(rows, 2 * held_rows) - held_rows if rows > held_rows else 0
        if columns > held_columns:
            columns = -(-max(columns, 2 * held_columns) // _BLOCK) * _BLOCK
        more_columns = max(0, min(columns, self.context_length) - held_columns)
        if more_rows or more_columns:
            self.store = F.pad(self.store, (0, 0, 0, more_columns, 0, 0, 0, more_rows))
            self.recorded = {}

    def copy(self, source: int, target: int, columns: int) -> None:
        """Copy so many columns of a row to another one."""
        self.store[:, :, target, :, :columns] = self.store[:, :, source, :, :columns]

    def clear(self, row: int) -> None:
        """Zero an unused row: masking cannot hide NaN."""
        self.store[:, :, row] = 0


class Rows(KeyValueCache):
    """Some rows of one layer while tokens are appended to each: keys and values (N, H, S, K).

    `columns`, (N, T), are the new tokens' places; S - T tokens were held by the longest row.
    """

    def __init__(self, keys: Tensor, values: Tensor, columns: Tensor) -> None:
        self.keys, self.values, self.length = keys, values, keys.shape[2] - columns.shape[1]
        rows = torch.arange(len(columns), device=columns.device)[:, None]  # (N, 1)
        self._new = rows, slice(None), columns

    def update(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write (N, H, T, K) each to their places and return the columns in use, (N, H, S, K) each."""
        self.keys[self._new] = key.transpose(1, 2)
        self.values[self._new] = value.transpose(1, 2)
        return self.keys, self.values
