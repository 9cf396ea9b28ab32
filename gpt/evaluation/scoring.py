"""Cross-entropy in nats of the tokens of a text.

Shapes: B rows, T tokens in a row, N scored tokens, D emb_dim, V vocab_size.
"""

import math
import sys
from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from gpt.data.prepared import Prepared
from gpt.data.windows import IGNORE_INDEX, Batch, each_token_once, make_batch
from gpt.errors import InputError
from gpt.model import GPT

ERROR_BLOCKS = 32
SAMPLE = 8192
"""Tokens enough for an estimate of the loss; GPT-2 small scores them in ten seconds on two cores."""
_AT_ONCE = 1024  # tokens whose logits are in memory together; GPT-2's take 206 MB
_WINDOWS = 8  # windows in a batch


def bits_per_byte(nats: NDArray[np.float64], sizes: NDArray[np.int64]) -> tuple[float, float]:
    """Return bits per byte and their standard error, from a text's nats and bytes per window in order, (N,).

    The error is that of a ratio (Cochran 1977, "Sampling Techniques", section 6.4). Neighbouring windows are
    alike, so it is computed over `ERROR_BLOCKS` blocks of neighbours. It is infinite with a single block.
    """
    scored = (nats != 0) | (sizes != 0)  # without windows that are only padding
    nats = nats[scored]
    sizes = sizes[scored]
    count = min(ERROR_BLOCKS, int(np.count_nonzero(sizes)))
    if not count:
        return float("nan"), float("inf")
    block = np.arange(len(sizes)) * count // len(sizes)
    bits = np.bincount(block, nats) / math.log(2)
    size = np.bincount(block, sizes)
    ratio = float(bits.sum() / size.sum())
    spread = float(np.square(bits - ratio * size).sum())
    error = math.sqrt(spread * count / (count - 1)) / float(size.sum()) if count > 1 else math.inf
    return ratio, error


def score_windows(
    model: GPT,
    prepared: Prepared,
    split: str,
    most: int = sys.maxsize,
    advance: Callable[[int], object] = lambda _: None,
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the nats of a split's windows and their bytes, (windows,) each.

    The windows are those of `batches_of`. The model has to be in evaluation mode. `advance` gets the bytes of
    each batch. Raises InputError for a split without tokens.
    """
    byte_lengths = prepared.tokenizer.byte_lengths()
    nats: list[NDArray[np.float64]] = []
    sizes: list[NDArray[np.int64]] = []
    for x, targets, *_ in batches_of(prepared, split, model.config.context_length, most):
        ids = targets.numpy()
        nats.append(score(model, x, targets).sum(dim=1).numpy())
        sizes.append(np.where(ids == IGNORE_INDEX, 0, byte_lengths[ids]).sum(axis=1))
        advance(int(sizes[-1].sum()))
    return np.concatenate(nats), np.concatenate(sizes)


def batches_of(
    prepared: Prepared, split: str, length: int, most: int = sys.maxsize, *, isolate: bool = False
) -> Iterator[Batch]:
    """Yield batches of windows of `length` tokens that have each token of a split once.

    With `most`, they have only about so many tokens, spread over the split. `<|endoftext|>` precedes the
    first. Windows end where examples end. With `isolate`, the document of each token follows x and y. Raises
    InputError for a split without tokens.
    """
    stream = prepared.stream(split)
    if not len(stream):
        raise InputError(f"there is no text to score in the split {split}")
    every = -(-len(stream) // most)
    starts, lengths = (part[::every] for part in each_token_once(stream, length))
    for first in range(0, len(starts), _WINDOWS):
        batch = slice(first, first + _WINDOWS)
        yield make_batch(stream, (starts[batch], lengths[batch]), length, isolate)


@torch.inference_mode()
def score(model: GPT, tokens: Tensor, targets: Tensor) -> Tensor:
    """Return the nats of each target, (B, T) on the CPU.

    Both arguments are (B, T) int64. Targets of IGNORE_INDEX are not scored: their nats are 0.
    """
    nats = torch.zeros(targets.shape, dtype=torch.float64)
    places = (targets != IGNORE_INDEX).nonzero()  # (N, 2)
    tensors = (places, *scored_features(model, tokens, targets))
    for place, part, wanted in zip(*(torch.split(tensor, _AT_ONCE) for tensor in tensors), strict=True):
        logits = model.head(part).float()  # (n, V)
        losses = F.cross_entropy(logits, wanted, reduction="none")
        nats[place.unbind(1)] = losses.cpu().double()  # MPS has no float64
    return nats


def scored_features(
    model: GPT, tokens: Tensor, targets: Tensor, document_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return what the head reads at the scored positions, (N, D), and their targets, (N,), on its device.

    All arguments are (B, T) int64. With `document_ids`, attention keeps within documents.
    """
    device = model.token_embedding.weight.device
    if document_ids is not None:
        document_ids = document_ids.to(device)
    features = model.features(tokens.to(device), document_ids=document_ids)  # (B, T, D)
    targets = targets.to(device)
    scored = targets != IGNORE_INDEX
    return features[scored], targets[scored]
