"""Compute logits with the model's own `forward` in PyTorch. Caches are used if they do not change the result.

Shapes: N rows, T tokens of each, S columns of their cache, V vocab_size, R scored tokens.
"""

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import groupby

import torch
from torch import Tensor

from gpt.generation.cache import Cache, Read, Rows
from gpt.model import GPT


class Forward:
    """A backend that calls `model.forward`.

    Texts that are read together change each other's logits slightly, by rounding.

    Args:
        model: the model. It computes in evaluation mode and returns to its own mode.
        cached: whether to use caches. Without them, each read computes the whole window.
    """

    def __init__(self, model: GPT, *, cached: bool) -> None:
        self.model = model
        self.cached = cached
        # A suitable cache has the device and type of this tensor.
        self.like = next(
            parameter.detach() for parameter in model.parameters() if parameter.is_floating_point()
        )
        # A model that is compiled for training would be compiled again for each length of a text.
        self._is_compiled = any(module._compiled_call_impl for module in model.modules())

    def read(self, reads: Sequence[Read], cache: Cache) -> Tensor:
        """Return the logits (R, V) of the scored tokens. The reads must be of adjacent rows."""
        if not self.cached:
            reads = [read._replace(held=0) for read in reads]
        parts = [self._batch(list(group), cache) for _, group in groupby(reads, _kind)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)  # a copy of one part would take time

    def _batch(self, reads: Sequence[Read], cache: Cache) -> Tensor:
        first = reads[0]
        device = self.like.device
        tokens = torch.tensor([read.tokens[read.held :] for read in reads], device=device)  # (N, T)
        if not self.cached:
            return self.logits(tokens, first.scored).flatten(0, 1)
        held = torch.tensor([read.held for read in reads], device=device)
        places = torch.arange(max(len(read.tokens) for read in reads), device=device)  # (S,)
        positions = held[:, None] + places[: tokens.shape[1]]  # (N, T)
        even = all(read.held == first.held for read in reads)
        # Where rows differ in what they hold, each has one new token (`_kind`), and sees all up to itself.
        mask = None if even else places > held[:, None]  # (N, S)
        rows = cache.store[:, :, first.row : first.row + len(reads), :, : len(places)]
        return self.logits(
            tokens,
            first.scored,
            last=first.scored,
            positions=positions,
            key_padding_mask=mask,
            caches=[Rows(keys, values, positions) for keys, values in rows],
        ).flatten(0, 1)

    def logits(self, tokens: Tensor, scored: int, **inputs: object) -> Tensor:
        """Return the logits of the last `scored` tokens of each row: tokens (N, T) -> (N, scored, V)."""
        was_training = self.model.training
        if was_training:  # each call of eval() and train() visits all modules
            self.model.eval()
        eager = torch.compiler.set_stance("force_eager") if self._is_compiled else nullcontext()
        unplanned = _WITHOUT_CUDNN if self.like.is_cuda else nullcontext()
        try:
            with eager, unplanned:
                return self.model(tokens, **inputs)[:, -scored:]
        finally:
            if was_training:
                self.model.train()


def _kind(read: Read) -> tuple[int, ...]:
    """Return a key that is equal for reads that fit into one batch.

    These are reads of one new token each, or of the same number of new tokens after the same number held.
    """
    new = len(read.tokens) - read.held
    return new, read.scored, read.held if new > 1 else 0


class _WithoutCudnnAttention:
    """A context in which PyTorch does not use cuDNN's attention, its first choice on a Hopper GPU.

    cuDNN builds a plan for every new shape, which takes up to a second. Generation has many shapes. Training
    has only one, and may use cuDNN. The switch is global to the process. So the first of several threads
    switches cuDNN off, and the last restores it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before = True

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._before = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
                torch.backends.cuda.enable_cudnn_sdp(False)
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                torch.backends.cuda.enable_cudnn_sdp(self._before)


_WITHOUT_CUDNN = _WithoutCudnnAttention()
