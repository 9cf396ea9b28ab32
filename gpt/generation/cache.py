"""A key-value cache whose rows differ in length and can join and leave: continuous batching needs it.

The tokens of a row are in its columns 0, 1, ..., so no padding is stored, a token's column is its position,
and rows that join or leave do not move the tokens of others. Columns past a row's end are masked.

Shapes: N rows in use, H heads, S columns attended to, L columns allocated, K width of a head.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from gpt.attention import KeyValueCache
from gpt.config import GPTConfig

# S is a multiple of this. With any other tail the order of summation would depend on the longest row of the
# batch, and a row's result on the other rows.
_BLOCK = 64


@dataclass(eq=False)
class Read:
    """Tokens to read after those that a cache holds already; their keys and values are added to it."""

    tokens: Sequence[int]
    held: int  # how many tokens the cache holds
    store: Tensor  # (layers, 2, H, L, K)
    every: bool = False  # whether to compute the logits of every token, or of the last alone

    @property
    def scored(self) -> int:
        """How many logits there will be."""
        return len(self.tokens) if self.every else 1


class RowCache:
    """Storage for rows that grows by doubling; `lengths` counts the tokens of each row in use."""

    def __init__(self, config: GPTConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.context_length = config.context_length
        self.lengths: list[int] = []
        columns = min(_BLOCK, config.context_length)
        shape = (config.num_layers, 2, 1, config.num_heads, columns, config.emb_dim // config.num_heads)
        self._store = torch.zeros(shape, device=device, dtype=dtype)  # (layers, 2, rows, H, columns, K)

    def join(self) -> int:
        """Add an empty row and return its number."""
        self.lengths.append(0)
        self._reserve(0)
        return len(self.lengths) - 1

    def leave(self, row: int) -> None:
        """Remove a row; the last one takes its number."""
        last = len(self.lengths) - 1
        used = self.lengths[last]
        if row != last:
            self._store[:, :, row, :, :used] = self._store[:, :, last, :, :used]
            self.lengths[row] = used
        self.lengths.pop()

    def fill(self, row: int, prompt: Tensor) -> None:
        """Copy the keys and values of a prompt (layers, 2, H, S, K) into `row`."""
        used = prompt.shape[3]
        self._reserve(used)
        self._store[: len(prompt), :, row, :, :used] = prompt
        self.lengths[row] = used

    def append(self, tokens: Sequence[int]) -> list[Read]:
        """Add a column to every row, for its next token."""
        lengths, store = self.lengths, self._append()
        return [Read([token], lengths[row], store[:, :, row]) for row, token in enumerate(tokens)]

    def _append(self) -> Tensor:
        self._reserve(max(self.lengths) + 1)
        self.lengths = [length + 1 for length in self.lengths]
        return self._store

    def next_step(self) -> "tuple[list[StepCache], Tensor, Tensor]":
        """Add a column to every row, and return what the model needs to append one token to each: a cache for
        each layer, the tokens' positions (N, 1) and the key padding mask (N, S).
        """
        lengths, store = torch.tensor(self.lengths, device=self._store.device), self._append()
        device, columns = store.device, self._blocks(max(self.lengths))
        masked = torch.arange(columns, device=device) > lengths[:, None]  # (N, S)
        rows = torch.arange(len(self.lengths), device=device)
        bias = torch.zeros(masked.shape, device=device, dtype=store.dtype)
        bias = bias.masked_fill_(masked, -torch.inf)[:, None, None]  # (N, 1, 1, S)
        caches = [StepCache(keys, values, columns - 1, rows, lengths, bias) for keys, values in store]
        return caches, lengths[:, None], masked

    def _blocks(self, columns: int) -> int:
        return min(-(-columns // _BLOCK) * _BLOCK, self.context_length)

    def _reserve(self, columns: int) -> None:
        """Allocate all rows in use and at least this many columns."""
        rows, held = self._store.shape[2], self._store.shape[4]
        more_rows = rows if len(self.lengths) > rows else 0
        needed = self._blocks(columns)
        more = min(max(needed, 2 * held), self.context_length) - held if needed > held else 0
        if more_rows or more:
            self._store = F.pad(self._store, (0, 0, 0, more, 0, 0, 0, more_rows))


class LayerCache(KeyValueCache):
    """The cache of one layer and of one text, kept in memory (2, H, L, K) that is given."""

    def __init__(self, store: Tensor, length: int) -> None:
        (self.keys, self.values), self.length = store[:, None], length  # (1, H, L, K) each


@dataclass(eq=False)
class StepCache(KeyValueCache):
    """The rows of one layer while one token is appended to each."""

    keys: Tensor  # (rows, H, L, K)
    values: Tensor  # (rows, H, L, K)
    length: int  # S - 1
    rows: Tensor  # (N,)
    lengths: Tensor  # (N,), of the rows
    bias: Tensor  # (N, 1, 1, S), added to scores to mask columns; all layers share it

    def update(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write (N, H, 1, K) each at the end of its row and return the columns in use, (N, H, S, K) each."""
        self.keys[self.rows, :, self.lengths] = key[:, :, 0]
        self.values[self.rows, :, self.lengths] = value[:, :, 0]
        used, columns = len(self.rows), self.length + 1
        return self.keys[:used, :, :columns], self.values[:used, :, :columns]

    def check(self, shape: Sequence[int]) -> None:
        """Nothing: `next_step` made place for one token of each row."""
