"""Which window comes when, and what is in it: a pure function of (seed, global batch).

A window is at most T consecutive targets, each with the token before it as its input: the stream's first
token has an end of text before it. An epoch visits every window once, in the order of a permutation that is
computed, not stored.

Shapes: B rows of a batch on this process, T context length, N windows.
"""

import math
from array import array
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from gpt.data.shards import TokenStream
from gpt.errors import InputError

IGNORED = -100
"""The target of a position that predicts nothing, as `cross_entropy` has it."""

_ROUNDS = 8
_PLAN_WINDOWS = 4096


class Permutation:
    """A pseudorandom permutation of 0 .. size - 1 in constant memory.

    A Feistel network over Z_a x Z_b with a * b just above `size`, walked on until it lands below `size`
    (Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains", sections 4 and 5).

    Args:
        size: at least 1.
        key: integers that decide the permutation.
    """

    def __init__(self, size: int, key: tuple[int, ...]) -> None:
        self.size = size
        a = max(1, round(size**0.5))
        self._sides = np.uint64(a), np.uint64(-(-size // a))
        self._keys = np.random.SeedSequence(key).generate_state(_ROUNDS, np.uint64)

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """What stands at `positions`, any shape of numbers in [0, size)."""
        values = self._walk(positions.astype(np.uint64))
        while (outside := values >= self.size).any():
            values[outside] = self._walk(values[outside])
        return values.astype(np.int64)

    def _walk(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        a, b = self._sides
        left, right = values // b, values % b  # in Z_a and Z_b
        for even, odd in self._keys.reshape(-1, 2):
            left = (left + _mix(right, even) % a) % a
            right = (right + _mix(left, odd) % b) % b
        mixed: NDArray[np.uint64] = left * b + right
        return mixed


def _mix(values: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """The finalizer of splitmix64 (Steele, Lea and Flood 2014) over the value and a key, modulo 2**64."""
    mixed = values + key
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: NDArray[np.uint64] = mixed ^ (mixed >> np.uint64(31))
    return result


class Grid:
    """Windows of T targets side by side: each token is a target in one, but for a few at the ends.

    Args:
        tokens: of the stream.
        context_length: T.
        seed: decides the offsets.
        shift: begin at another offset in [0, T) each epoch, so that the text is cut elsewhere. The number of
            windows then stays the same, and is one fewer than fit at offset 0, if more than one does.

    Raises:
        InputError: the stream is shorter than one window.
    """

    def __init__(self, tokens: int, context_length: int, seed: int = 0, shift: bool = False) -> None:
        _check_length(tokens, context_length)
        self.context_length, self.seed = context_length, seed
        self.count = max(1, (tokens - (context_length - 1 if shift else 0)) // context_length)
        self._offsets = min(tokens - self.count * context_length + 1, context_length) if shift else 1

    def place(self, windows: NDArray[np.int64], epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The first target of some windows, and how many follow on it: all T."""
        offset = int(np.random.default_rng((self.seed, epoch, 1)).integers(self._offsets))
        return windows * self.context_length + offset, np.full_like(windows, self.context_length)


class Packed:
    """Windows of at most T targets that end where a document does, unless the document is longer than T.

    Documents are taken in their order; one that does not fit in the rest of a window opens the next, and
    the rest is padding. A document of more than T tokens fills what is left and goes on. Each window takes
    8 bytes of memory.

    Args:
        document_starts: (documents,), ascending, the first 0.
        tokens: of the stream.
        context_length: T.

    Raises:
        InputError: the stream is shorter than one window.
    """

    def __init__(self, document_starts: NDArray[np.int64], tokens: int, context_length: int) -> None:
        _check_length(tokens, context_length)
        starts, begin = array("q"), 0
        while begin < tokens:
            starts.append(begin)
            begin = self._end(
                document_starts, begin, min(begin + context_length, tokens), tokens, context_length
            )
        self._starts = np.array([*starts, tokens], np.int64)
        self.count = len(starts)

    @staticmethod
    def _end(documents: NDArray[np.int64], begin: int, limit: int, tokens: int, longest: int) -> int:
        """Where the window that begins at `begin` ends, at `limit` at the latest."""
        following = int(np.searchsorted(documents, limit, side="right"))
        last = int(documents[following - 1])
        length = (int(documents[following]) if following < len(documents) else tokens) - last
        return last if begin < last and last + length > limit and length <= longest else limit

    def place(self, windows: NDArray[np.int64], epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The first target of some windows, and how many targets they have."""
        return self._starts[windows], self._starts[windows + 1] - self._starts[windows]


def _check_length(tokens: int, context_length: int) -> None:
    if context_length < 1:
        raise InputError(f"context_length must be at least 1, got {context_length}")
    if tokens < context_length:
        raise InputError(
            f"the training text has {tokens} tokens, fewer than the context_length of {context_length}: "
            "give more text or a smaller context_length"
        )


@dataclass(frozen=True, kw_only=True)
class WindowOrder:
    """Which windows each batch has.

    Window g of a run, counted over all processes, is number g % N of epoch g // N. Batch k of this process is
    the B windows from (k * world + rank) * B on: processes share nothing, a batch may straddle two epochs,
    and there is no remainder.

    Raises:
        InputError: a size below one.
    """

    windows: Grid | Packed
    batch_size: int
    seed: int = 0
    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise InputError(f"batch_size must be at least 1, got {self.batch_size}")

    @property
    def batches(self) -> int:
        """Batches, on each process, until every window was seen once."""
        return math.ceil(self.windows.count / (self.batch_size * self.world))

    def plan(self, batches: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The first target and the length of each window of some batches: (len(batches), B) both."""
        first = (batches * self.world + self.rank) * self.batch_size
        epochs, positions = np.divmod(first[:, None] + np.arange(self.batch_size), self.windows.count)
        starts, lengths = np.empty_like(positions), np.empty_like(positions)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            permutation = Permutation(self.windows.count, (self.seed, epoch, 0))
            starts[here], lengths[here] = self.windows.place(permutation(positions[here]), epoch)
        return starts, lengths


Batch = tuple[Tensor, ...]


def make_batch(
    stream: TokenStream,
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    context_length: int,
    isolate: bool,
) -> Batch:
    """Inputs and targets of the windows whose first targets stand at `starts`.

    Args:
        stream: where the tokens are.
        starts: (B,).
        lengths: (B,) targets in each window, the rest of its row being padding.
        context_length: T.
        isolate: also give the document of each input, counted from 0 in its row. A document begins with the
            end of text before it, from which its first token is predicted.

    Returns:
        x, y and, if asked for, document ids: (B, T) int64 each. Padding is 0 in x and -100 in y.
    """
    rows = stream.rows(starts, context_length)
    x = rows[:, :-1].astype(np.int64)
    y = rows[:, 1:].astype(np.int64)
    if (lengths < context_length).any():
        padding = np.arange(context_length) >= lengths[:, None]
        x[padding] = 0
        y[padding] = IGNORED
    if not isolate:
        return torch.from_numpy(x), torch.from_numpy(y)
    document = np.cumsum(x == stream.eot, axis=1)
    return torch.from_numpy(x), torch.from_numpy(y), torch.from_numpy(document - document[:, :1])


class TrainWindows(Dataset[Batch]):
    """Training batches by number: `dataset[k]` is batch k of this process, for any k from 0 on."""

    def __init__(
        self, stream: TokenStream, order: WindowOrder, context_length: int, isolate: bool = False
    ) -> None:
        self.stream, self.order, self.context_length, self.isolate = stream, order, context_length, isolate
        # A permutation costs much the same for one window as for thousands: plan many batches at once.
        self._planned = max(1, min(_PLAN_WINDOWS, 8 * order.windows.count) // order.batch_size)
        self._plan_number = -1
        self._starts = self._lengths = np.empty((0, 0), np.int64)

    def __len__(self) -> int:
        return self.order.batches

    def __getitem__(self, batch: int) -> Batch:
        number, within = divmod(batch, self._planned)
        if number != self._plan_number:
            batches = np.arange(number * self._planned, (number + 1) * self._planned)
            self._starts, self._lengths = self.order.plan(batches)
            self._plan_number = number
        return make_batch(
            self.stream, self._starts[within], self._lengths[within], self.context_length, self.isolate
        )


class EvalWindows(Dataset[Batch]):
    """A split once, in order: each token is a target in exactly one row.

    Every process has the same number of batches, all of B rows; what is left over is padding, so a loss must
    be summed over targets and divided by their number.
    """

    def __init__(
        self,
        stream: TokenStream,
        context_length: int,
        batch_size: int,
        rank: int = 0,
        world: int = 1,
        isolate: bool = False,
    ) -> None:
        self.stream, self.context_length, self.batch_size = stream, context_length, batch_size
        self.rank, self.world, self.isolate = rank, world, isolate

    def __len__(self) -> int:
        return math.ceil(len(self.stream) / (self.context_length * self.batch_size * self.world))

    def __getitem__(self, batch: int) -> Batch:
        first = (batch * self.world + self.rank) * self.batch_size
        starts = np.arange(first, first + self.batch_size) * self.context_length
        lengths = np.clip(len(self.stream) - starts, 0, self.context_length)
        return make_batch(self.stream, starts, lengths, self.context_length, self.isolate)
