"""Choose the windows of the text for each batch. The choice depends only on the seed and the batch's number.

A window is at most T consecutive targets. The input of a target is the token before it. An epoch visits every
window once, in the order of a permutation that is computed, not stored.

Shapes: B windows in a batch of this process, T context_length, N windows in an epoch.
"""

import math
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpt.data.prepared import Stream
from gpt.data.respelling import Respelling
from gpt.data.stored import Stored, is_scored, may_be_unscored, token_ids

# The target of a position that is not scored, as in `cross_entropy`: padding, and what the model is not to
# learn to write of an example, such as the prompt.
IGNORE_INDEX = -100
Batch = tuple[Tensor, ...]  # x, y, and with `isolate` the document of each token: (B, T) int64 each


class WeightedBatch(NamedTuple):
    """A batch and its weight in an update whose batches have different numbers of scored tokens.

    The weight is the batch's number of scored tokens, divided by the mean of this number over all batches of
    the update on all processes. The mean of the batches' losses, each times its weight, is then the mean over
    all scored tokens of the update.
    """

    x: Tensor
    y: Tensor
    documents: Tensor | None
    weight: Tensor
    """A positive float32 scalar, (). Exactly 1 if all batches of the update have equally many."""


Spans = tuple[NDArray[np.int64], NDArray[np.int64]]  # each window's first target and number of targets
_WINDOWS_AT_ONCE = 4096
# Ends of the random generators' seeds, which keep the generators independent. `respelling.py` has the third.
_ORDER = 0
_OFFSET = 1


def permute(positions: NDArray[np.int64], size: int, key: tuple[int, ...]) -> NDArray[np.int64]:
    """Look up `positions` in the pseudorandom permutation `key` of 0 .. size - 1, in constant memory.

    A stored one would take 300 MB in each process for 10 GB of text in windows of 64 tokens. This is a
    Feistel network over Z_a x Z_b with a * b just above `size`. It is applied again until the value is below
    `size` (Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains", sections 4 and 5).
    """
    keys = np.random.SeedSequence(key).generate_state(8, np.uint64)  # one for each of 8 rounds
    side = max(1, round(size**0.5))
    a = np.uint64(side)
    b = np.uint64(-(-size // side))

    def encrypt(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left = values // b  # in Z_a
        right = values % b  # in Z_b
        for even, odd in keys.reshape(-1, 2):
            left = (left + _mix(right, even) % a) % a
            right = (right + _mix(left, odd) % b) % b
        return left * b + right

    values = encrypt(positions.astype(np.uint64))
    while (outside := values >= size).any():
        values[outside] = encrypt(values[outside])
    return values.astype(np.int64)


def _mix(values: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """Apply the finalizer of splitmix64 (Steele, Lea and Flood 2014) to value + key, modulo 2**64."""
    values = values + key
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class Grid:
    """Adjacent windows of T targets, for plain text. With `shift`, they begin at another offset each epoch.

    Windows begin and end anywhere in a document. So a document longer than T is in several windows, and the
    end of one and the beginning of the next may be in the same window. All epochs have the same number of
    windows.
    """

    def __init__(self, tokens: int, context_length: int, seed: int = 0, shift: bool = False) -> None:
        self.context_length = context_length
        self.seed = seed
        self.count = max(1, (tokens - (context_length - 1 if shift else 0)) // context_length)
        self._offsets = min(tokens - self.count * context_length + 1, context_length) if shift else 1

    def spans(self, windows: NDArray[np.int64], epoch: int) -> Spans:
        """Return the spans of the windows with these numbers in an epoch."""
        offset = int(np.random.default_rng((self.seed, epoch, _OFFSET)).integers(self._offsets))
        return windows * self.context_length + offset, np.full_like(windows, self.context_length)


class Packed:
    """Windows of whole examples, of at most T targets each: those of `pack` that have a scored token.

    `document_starts`, (documents,), are the positions of the documents' first tokens. `scored`, (tokens,)
    bool, says which tokens are scored; by default all are.
    """

    def __init__(
        self,
        document_starts: NDArray[np.int64],
        tokens: int,
        context_length: int,
        scored: NDArray[np.bool_] | None = None,
    ) -> None:
        self.context_length = context_length
        starts = pack(document_starts, tokens, context_length)
        lengths = np.diff(starts, append=tokens)
        scored_tokens = lengths if scored is None else np.add.reduceat(scored, starts, dtype=np.int64)
        kept = scored_tokens > 0
        self._starts = starts[kept]  # (N,)
        self._lengths = lengths[kept]  # (N,)
        self.scored_tokens = scored_tokens[kept]  # (N,), in each window
        self.count = len(self._starts)

    def spans(self, windows: NDArray[np.int64], epoch: int) -> Spans:
        """Return the spans of the windows with these numbers. They are the same in every epoch."""
        return self._starts[windows], self._lengths[windows]


def pack(document_starts: NDArray[np.int64], tokens: int, context_length: int) -> NDArray[np.int64]:
    """Pack documents, (documents,) first tokens, into windows of at most T: return their starts, (windows,).

    Documents keep their order, and each window ends where the next begins. A document that does not fit into
    the rest of a window begins the next one. Only a document longer than T is cut: it continues in the next
    window.
    """
    document_ends = np.append(document_starts[1:], tokens)
    windows = array("q")  # the starts so far
    begin = 0
    while begin < tokens:
        windows.append(begin)
        full = min(begin + context_length, tokens)  # where the window would end if it had no gap
        document = np.searchsorted(document_starts, full, side="right") - 1  # the one with this position
        start = int(document_starts[document])
        end = int(document_ends[document])
        would_be_cut = begin < start < full < end
        fits_next_window = end - start <= context_length
        begin = start if would_be_cut and fits_next_window else full
    return np.array(windows, np.int64)


def make_batch(
    stream: Stream,
    spans: Spans,
    context_length: int,
    isolate: bool,
    respell: Callable[[Stored], Stored] | None = None,
) -> Batch:
    """Make inputs x and targets y of B windows, (B, T) int64 each. With `isolate`, add each input's document.

    Padding is 0 in x and IGNORE_INDEX in y. A token of an example that is not scored is IGNORE_INDEX in y
    too. Raises InputError for a token that the vocabulary does not have.
    """
    starts, lengths = spans
    rows = stream.rows(starts, context_length)  # (B, T + 1)
    if respell is not None:
        rows = respell(rows)
    tokens = token_ids(rows)
    x = tokens[:, :-1]
    y = tokens[:, 1:]
    if may_be_unscored(rows):
        y = np.where(is_scored(rows[:, 1:]), y, IGNORE_INDEX)
    if lengths.min() < context_length:
        padding = np.arange(context_length) >= lengths[:, None]
        x = np.where(padding, 0, x)
        y = np.where(padding, IGNORE_INDEX, y)
    batch = [x, y]
    if isolate:
        batch.append(_documents(stream, starts, x))
    return tuple(map(torch.from_numpy, batch))


def _documents(stream: Stream, starts: NDArray[np.int64], x: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the document of each input, (B, T), counted from 0 in each row.

    An input belongs to the document of its target. So a document begins with the `<|endoftext|>` before it,
    which shows where it is in plain text, also in a respelled window. A conversation has one after each
    reply, so the index of the examples tells where each begins.
    """
    if stream.example_starts is None:
        document = np.cumsum(x == stream.eot, axis=1)
    else:
        targets = starts[:, None] + np.arange(x.shape[1])
        document = np.searchsorted(stream.example_starts, targets, side="right")
    return document - document[:, :1]


Batches = TypeVar("Batches", int, NDArray[np.int64])


def _first_place(batch: Batches, batch_size: int, rank: int, world_size: int) -> Batches:
    """Return the place of the first window of a process's batch, or of each of several batches.

    The processes take batches one after another: batch 0 of each, then batch 1 of each.
    """
    return (batch * world_size + rank) * batch_size


@dataclass
class TrainWindows:
    """Training batches by number: `dataset[k]` is batch k of this process, for any k from 0 on.

    The places of a run's windows are counted over all processes. Place g holds the window at position g % N
    of the permutation of epoch g // N. A batch of a process holds B places, see `_first_place`.
    """

    stream: Stream
    windows: Grid | Packed
    batch_size: int
    seed: int = 0
    rank: int = 0
    world_size: int = 1
    isolate: bool = False
    respelling: Respelling | None = None

    def __post_init__(self) -> None:
        # For a short text these are the batches of eight epochs.
        self._batches_at_once = max(1, min(_WINDOWS_AT_ONCE, 8 * self.windows.count) // self.batch_size)
        self._looked_up: tuple[int, Spans] | None = None  # see `_spans_of`

    def __len__(self) -> int:
        """Return the number of batches of an epoch on each process, rounded up."""
        return math.ceil(self.windows.count / (self.batch_size * self.world_size))

    def __getitem__(self, batch: int) -> Batch:
        respell = None
        if self.respelling is not None:
            place = _first_place(batch, self.batch_size, self.rank, self.world_size)
            respell = partial(self.respelling, first=place)
        return make_batch(
            self.stream, self._spans_of(batch), self.windows.context_length, self.isolate, respell
        )

    def _spans_of(self, batch: int) -> Spans:
        """Return the spans of one batch of this process, (B,) each.

        They are looked up for a group of consecutive batches, as permuting one window takes about as long as
        thousands. The group is kept for the next batches.
        """
        group, place = divmod(batch, self._batches_at_once)
        if self._looked_up is None or self._looked_up[0] != group:
            batches = group * self._batches_at_once + np.arange(self._batches_at_once)
            self._looked_up = group, self.spans(batches)
        starts, lengths = self._looked_up[1]
        return starts[place], lengths[place]

    def spans(self, batches: NDArray[np.int64]) -> Spans:
        """Return the spans of the windows in this process's batches with these numbers: (batches, B) each."""
        first = _first_place(batches, self.batch_size, self.rank, self.world_size)
        places = first[:, None] + np.arange(self.batch_size)
        starts = np.empty_like(places)
        lengths = np.empty_like(places)
        for epoch, here, windows in self._windows_at(places):
            starts[here], lengths[here] = self.windows.spans(windows, epoch)
        return starts, lengths

    def scored_tokens(self, batches: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Return the number of tokens that each process scores in these batches: (len(batches), world_size).

        None if all windows have equally many.
        """
        if not isinstance(self.windows, Packed):
            return None
        first = _first_place(batches, self.batch_size, 0, self.world_size)
        places = first[:, None] + np.arange(self.world_size * self.batch_size)
        scored = np.empty_like(places)
        for _, here, windows in self._windows_at(places):
            scored[here] = self.windows.scored_tokens[windows]
        return scored.reshape(len(batches), self.world_size, self.batch_size).sum(axis=2)

    def _windows_at(
        self, places: NDArray[np.int64]
    ) -> Iterator[tuple[int, NDArray[np.bool_], NDArray[np.int64]]]:
        """For each epoch that has some of these places of the run, yield its number, a mask and windows.

        The mask says which places belong to the epoch. The windows are those at these places.
        """
        epochs, positions = np.divmod(places, self.windows.count)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            yield epoch, here, permute(positions[here], self.windows.count, (self.seed, epoch, _ORDER))


def each_token_once(stream: Stream, context_length: int) -> Spans:
    """Return the spans of windows that cover a stream in order: packed for examples, else adjacent."""
    if stream.example_starts is not None:
        packed = Packed(stream.example_starts, len(stream), context_length)
        return packed.spans(np.arange(packed.count), 0)
    starts = np.arange(0, len(stream), context_length)
    return starts, np.minimum(len(stream) - starts, context_length)


@dataclass
class EvalWindows:
    """All windows of a split once, in order, as batches.

    All processes have equally many batches. The last ones are filled with padding.
    """

    stream: Stream
    context_length: int
    batch_size: int
    rank: int = 0
    world_size: int = 1
    isolate: bool = False

    def __post_init__(self) -> None:
        self._spans = each_token_once(self.stream, self.context_length)

    def __len__(self) -> int:
        return math.ceil(len(self._spans[0]) / (self.batch_size * self.world_size))

    def __iter__(self) -> Iterator[Batch]:
        for batch in range(len(self)):
            yield self[batch]

    def __getitem__(self, batch: int) -> Batch:
        first = _first_place(batch, self.batch_size, self.rank, self.world_size)
        starts, lengths = (values[first : first + self.batch_size] for values in self._spans)
        padding = (0, self.batch_size - len(starts))
        spans = np.pad(starts, padding), np.pad(lengths, padding)
        return make_batch(self.stream, spans, self.context_length, self.isolate)
