"""Keys and values of rows that differ in length, join and leave: what decodes many texts in one batch.

A row's tokens lie in columns 0, 1, ... of its own, so no padding is stored, a token's column is its position,
and joining or leaving moves nobody else's tokens. Columns past a row's end are hidden from it.

Shapes: N rows in use, H heads, S columns looked at, K width of a head.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gpt.attention import KeyValueCache
from gpt.config import GPTConfig
from gpt.errors import InputError

_BLOCK = 64
"""Columns are looked at in blocks: with a tail of any other length, sums over them would be added up in an
order that depends on the longest row of the batch."""


class RowCache:
    """Room for rows, grown by doubling; `lengths` counts the tokens of each row in use.

    Args:
        config: of the model.
        device: where the model is.
        dtype: what its keys and values are.
    """

    def __init__(self, config: GPTConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.context_length = config.context_length
        self.lengths: list[int] = []
        columns = min(_BLOCK, config.context_length)
        shape = (config.num_layers, 2, 1, config.num_heads, columns, config.emb_dim // config.num_heads)
        self._store = torch.zeros(shape, device=device, dtype=dtype)  # (layers, 2, rows, H, columns, K)

    def join(self) -> int:
        """Take an empty row into use and return its number."""
        self.lengths.append(0)
        self._reserve(0)
        return len(self.lengths) - 1

    def leave(self, row: int) -> None:
        """Give up a row; the last one takes its number."""
        last = len(self.lengths) - 1
        used = self.lengths[last]
        if row != last:
            self._store[:, :, row, :, :used] = self._store[:, :, last, :, :used]
            self.lengths[row] = used
        self.lengths.pop()

    def fill(self, row: int, prompt: Sequence[KeyValueCache]) -> None:
        """Make the tokens of a prompt, one row in a cache for each layer, those of `row`."""
        used = prompt[0].length
        self._reserve(used)
        for layer, cache in zip(self._store, prompt, strict=True):
            layer[0, row, :, :used] = cache.keys[0, :, :used]
            layer[1, row, :, :used] = cache.values[0, :, :used]
        self.lengths[row] = used

    def one_more(self) -> tuple[list[KeyValueCache], Tensor, Tensor]:
        """What the model needs to append one token to every row.

        Returns:
            A cache for each layer; the tokens' positions (N, 1); and the key padding mask (N, S).
        """
        self._reserve(max(self.lengths) + 1)
        device = self._store.device
        lengths = torch.tensor(self.lengths, device=device)  # (N,)
        columns = self._blocks(max(self.lengths) + 1)
        hidden = torch.arange(columns, device=device) > lengths[:, None]  # (N, S)
        rows = torch.arange(len(self.lengths), device=device)
        self.lengths = [length + 1 for length in self.lengths]
        bias = torch.zeros(hidden.shape, device=device, dtype=self._store.dtype)
        bias = bias.masked_fill_(hidden, -torch.inf)[:, None, None]  # (N, 1, 1, S)
        caches = [OneMore(keys, values, rows, lengths, columns, bias) for keys, values in self._store]
        return list(caches), lengths[:, None], hidden

    def _blocks(self, columns: int) -> int:
        return min(-(-columns // _BLOCK) * _BLOCK, self.context_length)

    def _reserve(self, columns: int) -> None:
        """Room for all rows in use, and for so many columns."""
        rows, held = self._store.shape[2], self._store.shape[4]
        more_rows, more = max(rows, len(self.lengths)), max(held, self._blocks(columns))
        if (more_rows, more) == (rows, held):
            return
        more_rows = more_rows if more_rows == rows else max(more_rows, 2 * rows)
        more = more if more == held else min(max(more, 2 * held), self.context_length)
        layers, pair, _, heads, _, width = self._store.shape
        store = self._store.new_zeros(layers, pair, more_rows, heads, more, width)
        store[:, :, :rows, :, :held] = self._store
        self._store = store


class OneMore(KeyValueCache):
    """The rows of one layer, as `MultiHeadAttention` sees them while it appends a token to each.

    `bias` (N, 1, 1, S) is what hides columns when it is added to scores: the same for all layers.
    """

    def __init__(
        self, keys: Tensor, values: Tensor, rows: Tensor, lengths: Tensor, columns: int, bias: Tensor
    ) -> None:
        self.keys, self.values = keys, values  # (rows, H, L, K)
        self.rows, self.lengths, self.columns = rows, lengths, columns
        self.length, self.bias = columns - 1, bias

    def update(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write (N, H, 1, K) each at its row's end, and return the columns in use, (N, H, S, K) each."""
        self.keys[self.rows, :, self.lengths] = key[:, :, 0]
        self.values[self.rows, :, self.lengths] = value[:, :, 0]
        used = len(self.rows)
        return self.keys[:used, :, : self.columns], self.values[:used, :, : self.columns]

    def check(self, shape: Sequence[int]) -> None:
        """See that there is one new token a row."""
        if shape[0] != len(self.rows) or shape[2] != 1:
            raise InputError(f"expected one new token for each of {len(self.rows)} rows, got {tuple(shape)}")
