"""A key-value cache whose rows differ in length and can join and leave: continuous batching needs it.

The tokens of a row are in its columns 0, 1, ..., so no padding is stored, a token's column is its position,
and rows that join or leave do not move the tokens of others. Columns past a row's end are masked.

Shapes: N rows in use, H heads, S columns attended to, L columns allocated, K width of a head.
"""

from collections.abc import Hashable, Sequence
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
    """Storage for rows that grows to what is expected, or by doubling; `lengths` counts each row's tokens."""

    def __init__(self, config: GPTConfig, like: Tensor) -> None:
        self.context_length = config.context_length
        self.lengths: list[int] = []
        self._expected = 0, 0
        self._store = new_store(config, min(_BLOCK, config.context_length), like, 1)

    def expect(self, rows: int, columns: int) -> None:
        """What to allocate when memory grows."""
        self._expected = rows, -(-columns // _BLOCK) * _BLOCK

    def join(self, prompt: Tensor) -> None:
        """Copy the keys and values of a prompt (layers, 2, H, S, K) into a new row."""
        self.lengths.append(prompt.shape[3])
        self._reserve()
        self._store[:, :, len(self.lengths) - 1, :, : prompt.shape[3]] = prompt

    def leave(self, row: int) -> None:
        """Remove a row; the last one takes its number."""
        used = self.lengths.pop()
        if row < len(self.lengths):
            self._store[:, :, row, :, :used] = self._store[:, :, len(self.lengths), :, :used]
            self.lengths[row] = used

    def clear(self) -> None:
        """Forget what is held for no token: values that are not finite are not masked by a zero."""
        for row in range(self._store.shape[2]):
            held = self.lengths[row] if row < len(self.lengths) else 0
            self._store[:, :, row, :, held:] = 0

    def append(self) -> list[int]:
        """Add a column to every row, for its next token, and return how many each had."""
        held = self.lengths
        self.lengths = [length + 1 for length in held]
        self._reserve()
        return held

    @property
    def place(self) -> tuple[Hashable, ...]:
        """Equal places have equal addresses and shapes."""
        return self._store.data_ptr(), self._store.shape, len(self.lengths), self._columns

    def reads(self, tokens: Sequence[int], held: Sequence[int]) -> list[Read]:
        """The next token of every row, after so many, as the compiled program reads them."""
        return [Read([token], held[row], self._store[:, :, row]) for row, token in enumerate(tokens)]

    def layers(self, held: Tensor) -> "tuple[list[StepCache], Tensor, Tensor]":
        """What the model needs to append a token to each row after those that it held (N,): a cache for each
        layer, the tokens' positions (N, 1) and the key padding mask (N, S).
        """
        used = self._store[:, :, : len(held), :, : self._columns]  # (layers, 2, N, H, S, K)
        masked = torch.arange(self._columns, device=held.device) > held[:, None]  # (N, S)
        bias = self._store.new_zeros(masked.shape).masked_fill_(masked, -torch.inf)[:, None, None]
        new = torch.arange(len(held), device=held.device), slice(None), held
        caches = [StepCache(keys, values, self._columns - 1, new, bias) for keys, values in used]
        return caches, held[:, None], masked

    @property
    def _columns(self) -> int:
        """S: those of the longest row, in whole blocks."""
        return min(-(-max(self.lengths) // _BLOCK) * _BLOCK, self.context_length)

    def _reserve(self) -> None:
        """Allocate all rows in use and the columns attended to, seldom: all is copied, longer than a step."""
        rows, columns = self._store.shape[2], self._store.shape[4]
        more_rows = more_columns = 0
        if len(self.lengths) > rows:
            more_rows = max(self._expected[0], 2 * rows) - rows
        if self._columns > columns:
            wanted = self._expected[1] if self._columns <= self._expected[1] else 2 * columns
            more_columns = min(max(wanted, self._columns), self.context_length) - columns
        if more_rows or more_columns:
            self._store = F.pad(self._store, (0, 0, 0, more_columns, 0, 0, 0, more_rows))


class LayerCache(KeyValueCache):
    """The cache of one layer and of one text, kept in memory (2, H, L, K) that is given."""

    def __init__(self, store: Tensor, length: int) -> None:
        (self.keys, self.values), self.length = store[:, None], length  # (1, H, L, K) each


@dataclass(eq=False)
class StepCache(KeyValueCache):
    """The rows of one layer while one token is appended to each."""

    keys: Tensor  # (N, H, S, K)
    values: Tensor  # (N, H, S, K)
    length: int  # S - 1
    new: tuple[Tensor, slice, Tensor]  # the index of each row's next column, (N, H, K)
    bias: Tensor  # (N, 1, 1, S), added to scores to mask columns; all layers share it

    def update(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write (N, H, 1, K) each at the end of its row and return the columns in use, (N, H, S, K) each."""
        self.keys[self.new] = key[:, :, 0]
        self.values[self.new] = value[:, :, 0]
        return self.keys, self.values
