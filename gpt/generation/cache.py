"""A key-value cache whose rows differ in length and can join and leave: continuous batching needs it.

The tokens of a row are in its columns 0, 1, ..., so no padding is stored, a token's column is its position,
and rows that join or leave do not move the tokens of others. Columns past a row's end are masked.

Shapes: N rows in use, H heads, S columns attended to, L columns allocated, K width of a head.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gpt.attention import KeyValueCache
from gpt.config import GPTConfig
from gpt.generation.graphs import Recordings

_BLOCK = 64  # columns are allocated in multiples of it


@dataclass(eq=False)
class Read:
    """Tokens to read after those that a cache holds already; their keys and values are added to it."""

    tokens: Sequence[int]
    held: int  # how many tokens the cache holds
    store: Tensor  # (layers, 2, H, L, K)
    scored: int = 1  # how many of the last tokens the logits are computed of


def new_store(config: GPTConfig, columns: int, like: Tensor, *rows: int) -> Tensor:
    """Zeros (layers, 2, *rows, H, columns, K) for keys and values, of the device and type of `like`."""
    return like.new_zeros(
        config.num_layers, 2, *rows, config.num_heads, columns, config.emb_dim // config.num_heads
    )


class RowCache:
    """Storage for rows that grows to what is expected, or by doubling; `lengths` counts each row's tokens."""

    def __init__(self, config: GPTConfig, like: Tensor) -> None:
        self.context_length = config.context_length
        self.lengths: list[int] = []
        self.recorded: Recordings = {}  # steps on this memory
        self._store = new_store(config, min(_BLOCK, config.context_length), like, 1)

    def reserve(self, rows: int, columns: int) -> None:
        """Have memory for so many, or for twice what it was: all is copied, longer than a step takes."""
        held_rows, held_columns = self._store.shape[2], self._store.shape[4]
        more_rows = max(rows, 2 * held_rows) - held_rows if rows > held_rows else 0
        if columns > held_columns:
            columns = -(-max(columns, 2 * held_columns) // _BLOCK) * _BLOCK
        more_columns = max(0, min(columns, self.context_length) - held_columns)
        if more_rows or more_columns:
            self._store = F.pad(self._store, (0, 0, 0, more_columns, 0, 0, 0, more_rows))
            self.recorded = {}

    def join(self, prompt: Tensor) -> None:
        """Copy the keys and values of a prompt (layers, 2, H, S, K) into a new row."""
        self.lengths.append(prompt.shape[3])
        self.reserve(len(self.lengths), prompt.shape[3])
        self._store[:, :, len(self.lengths) - 1, :, : prompt.shape[3]] = prompt

    def leave(self, row: int) -> None:
        """Remove a row; the last one takes its number."""
        used = self.lengths.pop()
        if row < len(self.lengths):
            self._store[:, :, row, :, :used] = self._store[:, :, len(self.lengths), :, :used]
            self.lengths[row] = used
        self._store[:, :, len(self.lengths)] = 0  # a value that is not finite is not masked by a zero

    def append(self) -> list[int]:
        """Add a column to every row, for its next token, and return how many each had."""
        held = self.lengths
        self.lengths = [length + 1 for length in held]
        self.reserve(1, max(self.lengths))
        return held

    def reads(self, tokens: Sequence[int], held: Sequence[int]) -> list[Read]:
        """The next token of every row, after so many, as the compiled program reads them."""
        return [Read([token], held[row], self._store[:, :, row]) for row, token in enumerate(tokens)]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows in use, and the columns S that a step attends to.

        On a GPU, where a step is recorded for each shape, S is a power of two.
        """
        longest = max(self.lengths)
        if self._store.is_cuda:
            longest = max(_BLOCK, 1 << (longest - 1).bit_length())
        return len(self.lengths), min(longest, self._store.shape[4])

    def inputs(self, held: Tensor) -> dict[str, Any]:
        """What the model needs to append a token to each row after those that it held (N,)."""
        rows, columns = self.shape
        even = not self._store.is_cuda and min(self.lengths) == columns
        places = torch.arange(columns, device=held.device)  # (S,)
        new = torch.arange(rows, device=held.device), slice(None), held
        used = self._store[:, :, :rows, :, :columns]  # (layers, 2, N, H, S, K)
        return {
            "positions": held[:, None],
            "key_padding_mask": None if even else places > held[:, None],  # (N, S)
            "caches": [StepCache(keys, values, columns - 1, new) for keys, values in used],
        }


class LayerCache(KeyValueCache):
    """The cache of one layer, in memory (2, N, H, L, K) that is given."""

    def __init__(self, store: Tensor, length: int) -> None:
        (self.keys, self.values), self.length = store, length  # (N, H, L, K) each


class StepCache(KeyValueCache):
    """The rows of one layer, of different lengths, while one token is appended to each."""

    def __init__(self, keys: Tensor, values: Tensor, length: int, new: tuple[Tensor, slice, Tensor]) -> None:
        self.keys, self.values, self.length = keys, values, length  # (N, H, S, K) each, and S - 1
        self._new = new  # the index of each row's next column, (N, H, K)

    def update(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write (N, H, 1, K) each at the end of its row and return the columns in use, (N, H, S, K) each."""
        self.keys[self._new] = key[:, :, 0]
        self.values[self._new] = value[:, :, 0]
        return self.keys, self.values
