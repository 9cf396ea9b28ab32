"""A key-value cache for continuous batching: its texts differ in length, and start and end at any time.

The tokens of a row are in its columns 0, 1, .... So no padding is stored, a token's column is its position,
and rows that start or end do not move the tokens of others. Columns past a row's end are masked.

Shapes: N rows, H heads, S columns attended to, L columns allocated, T new tokens, K width of a head.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F

from gpt.attention import KeyValueCache
from gpt.config import GPTConfig


class Read(NamedTuple):
    """A window to read. A row already holds the keys and values of its first `held` tokens."""

    row: int
    tokens: Sequence[int]
    held: int = 0  # how many of the tokens the row already holds
    scored: int = 1  # for how many of the last tokens logits are computed


class Cache:
    """Memory (layers, 2, N, H, L, K) for rows of keys and values, with the device and type of `like`."""

    def __init__(self, config: GPTConfig, like: Tensor) -> None:
        heads = config.num_heads
        self.most = config.context_length
        self.store = like.new_zeros(config.num_layers, 2, 0, heads, 0, config.emb_dim // heads)

    def reserve(self, rows: int, columns: int) -> None:
        """Make room for at least this many rows and columns.

        It reserves more than needed, as growing copies the whole cache, which takes longer than a step.
        """
        held_rows = self.store.shape[2]
        held_columns = self.store.shape[4]
        more_rows = max(rows - held_rows, held_rows) if rows > held_rows else 0
        more_columns = min(2 * columns, self.most) - held_columns if columns > held_columns else 0
        if more_rows or more_columns:
            self.store = F.pad(self.store, (0, 0, 0, more_columns, 0, 0, 0, more_rows))

    def copy(self, source: int, target: int, columns: int) -> None:
        """Copy the first `columns` columns of a row to another row."""
        self.store[:, :, target, :, :columns] = self.store[:, :, source, :, :columns]


class Rows(KeyValueCache):
    """Some rows of one layer while T tokens are appended to each: keys and values (N, H, S, K).

    `columns`, (N, T), are the new tokens' columns. The longest row holds S - T tokens before.
    """

    def __init__(self, keys: Tensor, values: Tensor, columns: Tensor) -> None:
        self.keys = keys
        self.values = values
        self.columns = columns
        self.length = keys.shape[2] - columns.shape[1]

    def update(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write T new keys and values, (N, H, T, K) each. Return all columns in use, (N, H, S, K) each."""
        places = self.columns[:, None, :, None].expand_as(key)
        self.keys.scatter_(2, places, key)
        self.values.scatter_(2, places, value)
        return self.keys, self.values
