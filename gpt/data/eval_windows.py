"""The windows of a split that is scored: each token once, in order, for validation and `gpt evaluate`."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from gpt.data.shards import Stream
from gpt.data.windows import Batch, Packed, Spans, make_batch


def each_token_once(
    tokens: int, context_length: int, document_starts: NDArray[np.int64] | None = None
) -> Spans:
    """Windows of all of a stream in order, packed where `document_starts` are given, else side by side."""
    if document_starts is not None and tokens > context_length:
        packed = Packed(document_starts, tokens, context_length)
        return packed.spans(np.arange(packed.count), 0)
    starts = np.arange(0, tokens, context_length)
    return starts, np.minimum(tokens - starts, context_length)


@dataclass
class EvalWindows(Dataset[Batch]):
    """A split once, in order; all processes have equally many batches, the last filled up with padding."""

    stream: Stream
    context_length: int
    batch_size: int
    rank: int = 0
    world_size: int = 1
    isolate: bool = False
    document_starts: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        spans = each_token_once(len(self.stream), self.context_length, self.document_starts)
        self._spans = np.stack(spans)  # (2, windows)

    def __len__(self) -> int:
        return math.ceil(self._spans.shape[1] / (self.batch_size * self.world_size))

    def __getitem__(self, batch: int) -> Batch:
        first = (batch * self.world_size + self.rank) * self.batch_size
        found = self._spans[:, first : first + self.batch_size]
        starts, lengths = np.pad(found, ((0, 0), (0, self.batch_size - found.shape[1])))
        return make_batch(self.stream, (starts, lengths), self.context_length, self.isolate)
