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
    scored: int = 1  # how many of the last tokens the logits are computed of


def new_store(config: GPTConfig, columns: int, like: Tensor, *rows: int) -> Tensor:
    """Zeros (layers, 2, *rows, H, columns, K) for keys and values, of the device and type of `like`."""
    return like.new_zeros(
        config.num_layers, 2, *rows, config.num_heads, columns, config.emb_dim // config.num_heads
    )


class RowCache:
    """Storage for rows that grows by doubling; `lengths` counts the tokens of each row in use."""

    def __init__(self, config: GPTConfig, like: Tensor) -> None:
        self.context_length = config.context_length
        self.lengths: list[int] = []
        self._store = new_store(config, min(_BLOCK, config.context_length), like, 1)

    def fill(self, row: int, prompt: Tensor) -> None:
        """Copy the keys and values of a prompt (layers, 2, H, S, K) into `row`, a new one if it is N."""
        used = prompt.shape[3]
        self.lengths[row : row + 1] = [used]
        self._reserve(used)
        self._store[: len(prompt), :, row, :, :used] = prompt

    def leave(self, row: int) -> None:
        """Remove a row; the last one takes its number."""
        used = self.lengths.pop()
        if row < len(self.lengths):
            self._store[:, :, row, :, :used] = self._store[:, :, len(self.lengths), :, :used]
            self.lengths[row] = used

    def append(self, tokens: Sequence[int]) -> list[Read]:
        """Add a column to every row, for its next token, which the compiled program reads."""
        held = self._append()
        return [Read([token], held[row], self._store[:, :, row]) for row, token in enumerate(tokens)]

    def next_step(self) -> "tuple[list[StepCache], Tensor, Tensor]":
        """Add a column to every row, and return what the model needs to append one token to each: a cache for
        each layer, the tokens' positions (N, 1) and the key padding mask (N, S).
        """
        lengths = torch.tensor(self._append(), device=self._store.device)
        columns = self._blocks(max(self.lengths))
        masked = torch.arange(columns, device=lengths.device) > lengths[:, None]  # (N, S)
        rows = torch.arange(len(self.lengths), device=lengths.device)
        bias = self._store.new_zeros(masked.shape).masked_fill_(masked, -torch.inf)[:, None, None]
        caches = [StepCache(keys, values, columns - 1, rows, lengths, bias) for keys, values in self._store]
        return caches, lengths[:, None], masked

    def _append(self) -> list[int]:
        held = self.lengths
        self.lengths = [length + 1 for length in held]
        self._reserve(max(self.lengths))
        return held

    def _blocks(self, columns: int) -> int:
        return min(-(-columns // _BLOCK) * _BLOCK, self.context_length)

    def _reserve(self, columns: int) -> None:
        """Allocate all rows in use and at least this many columns."""
        rows, allocated = self._store.shape[2], self._store.shape[4]
        more_rows = rows if len(self.lengths) > rows else 0
        needed = self._blocks(columns)
        wanted = min(max(needed, 2 * allocated), self.context_length) if needed > allocated else allocated
        if more_rows or wanted > allocated:
            self._store = F.pad(self._store, (0, 0, 0, wanted - allocated, 0, 0, 0, more_rows))


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
