"""Cross-entropy in nats of the tokens of a text, and of the endings of questions.

Shapes: B rows, T tokens in a row, N scored tokens, D emb_dim, V vocab_size.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from gpt.data.shards import TokenStream
from gpt.data.windows import IGNORE_INDEX
from gpt.errors import InputError
from gpt.model import GPT

_LOGITS_AT_ONCE = 1 << 26  # in memory; those of one GPT-2 window take 206 MB
Question = tuple[list[int], list[int]]  # the tokens of a context, and those of a possible ending


def total_nats(
    model: GPT,
    stream: TokenStream,
    *,
    context_length: int | None = None,
    stride: int | None = None,
    batch_size: int = 8,
    scored: Callable[[Tensor], None] = lambda targets: None,
) -> float:
    """The sum of the nats of all tokens of a stream, each counted once, also in the last short window.

    `<|endoftext|>` precedes the first token. Windows of `context_length` T, the model's by default, start
    `stride` tokens apart, which is 1 .. T or an InputError, and score what earlier ones have not. `scored` is
    called with the scored targets (N,). The model is in evaluation mode.
    """
    length = context_length or model.config.context_length
    stride = length if stride is None else stride
    if not 1 <= stride <= length:
        raise InputError(f"stride must be 1 to the context_length {length}, got {stride}")
    device = next(model.parameters()).device
    starts = np.arange(1 + math.ceil(max(0, len(stream) - length) / stride)) * stride
    total = 0.0
    for first in range(0, len(starts), batch_size):
        batch = starts[first : first + batch_size]  # (B,)
        rows = torch.from_numpy(stream.rows(batch, length).astype(np.int64))  # (B, T + 1)
        position = torch.from_numpy(batch)[:, None] + torch.arange(length)  # (B, T) in the stream
        scored_until = torch.from_numpy(np.where(batch > 0, batch - stride + length, 0))[:, None]
        targets = rows[:, 1:].masked_fill((position < scored_until) | (position >= len(stream)), IGNORE_INDEX)
        nats, _ = score(model, rows[:, :-1].to(device), targets.to(device))
        total += float(nats.sum())
        scored(targets[targets != IGNORE_INDEX])
    return total


@torch.inference_mode()
def score(model: GPT, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Nats of each target, and whether it is the most likely token: (B, T) both, on the CPU.

    `tokens` and `targets` are (B, T) int64. Where a target is IGNORE_INDEX nothing is scored: nats are 0.
    """
    scored = targets != IGNORE_INDEX
    features = model.features(tokens)[scored]  # (N, D)
    nats, most_likely = torch.zeros(targets.shape, dtype=torch.float64), torch.zeros(targets.shape).bool()
    at_once = max(1, _LOGITS_AT_ONCE // model.config.vocab_size)
    tensors = (scored.nonzero().cpu(), features, targets[scored])
    for place, part, wanted in zip(*(torch.split(tensor, at_once) for tensor in tensors), strict=True):
        logits, index = model.head(part).float(), place.unbind(1)  # (n, V); rows and columns of the targets
        nats[index] = F.cross_entropy(logits, wanted, reduction="none").cpu().double()  # MPS has no float64
        most_likely[index] = (logits.argmax(-1) == wanted).cpu()
    return nats, most_likely


def answer(
    model: GPT, eot: int, questions: Iterable[Question], batch_size: int
) -> Iterator[tuple[float, bool]]:
    """For each question the nats of its ending, and whether greedy decoding writes it.

    Questions longer than the context length keep their last tokens; an empty context is `<|endoftext|>`.
    """
    waiting = iter(questions)
    device = next(model.parameters()).device
    while batch := list(islice(waiting, batch_size)):
        rows, targets = [], []
        for context, ending in batch:
            tokens = torch.tensor([*(context or [eot]), *ending])
            scored = torch.arange(len(tokens)) >= len(tokens) - len(ending)
            rows.append(tokens[-model.config.context_length - 1 : -1])
            targets.append(tokens.where(scored, IGNORE_INDEX)[1:][-model.config.context_length :])
        x = pad_sequence(rows, batch_first=True)  # padding on the right, which no token attends to
        y = pad_sequence(targets, batch_first=True, padding_value=IGNORE_INDEX)
        nats, most_likely = score(model, x.to(device), y.to(device))
        found = (most_likely | (y == IGNORE_INDEX)).all(dim=1)  # (B,)
        yield from zip(nats.sum(dim=1).tolist(), found.tolist(), strict=True)
