"""PyTorch's way to compute tokens: the model's own `forward`, with its caches where these change nothing.

Shapes: N rows, T tokens of each, S columns of their cache, V vocab_size, R tokens that are scored.
"""

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from gpt.generation.cache import Cache, Read, Rows
from gpt.model import GPT


class _WithoutCudnnAttention:
    """A block in which PyTorch leaves out cuDNN's attention, its first choice on a Hopper GPU.

    That one builds a plan, up to a second, for every new shape, and generation has many shapes; training has
    one, and keeps it. The switch is the process's: of several threads the first switches it off and the last
    switches it back.
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


class Forward:
    """Calls `model.forward`. Logits are close, not equal bit for bit, whatever is read beside a text.

    Args:
        model: computes in evaluation mode, whatever mode it is in.
        cached: whether to give it caches; without, a read is of a whole window.
    """

    def __init__(self, model: GPT, *, cached: bool) -> None:
        self.model = model
        self.cached = cached
        # What caches are like.
        self.like = next(one.detach() for one in model.parameters() if one.is_floating_point())
        # Compiled for training, the model would be compiled anew for each length of a text.
        self._is_compiled = any(one._compiled_call_impl for one in model.modules())

    def read(self, reads: Sequence[Read], cache: Cache) -> Tensor:
        """The logits (R, V) of the tokens to be scored; those of `reads` are of neighbouring rows."""
        if not self.cached:
            reads = [read._replace(held=0) for read in reads]
        return torch.cat([self._batch(list(group), cache) for _, group in groupby(reads, _kind)])

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
        rows = cache.store[:, :, first.row : first.row + len(reads), :, : len(places)]
        return self.logits(
            tokens,
            first.scored,
            last=first.scored,
            positions=positions,
            key_padding_mask=None if even else places > held[:, None],  # (N, S)
            caches=[Rows(keys, values, positions) for keys, values in rows],
        ).flatten(0, 1)

    def logits(self, tokens: Tensor, scored: int, **inputs: Any) -> Tensor:
        """Those of the last so many of tokens (N, T): (N, scored, V)."""
        was_training = self.model.training
        if was_training:
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
    """Equal for those that can be one batch: of single tokens, or of as many tokens after as many."""
    new = len(read.tokens) - read.held
    return new, read.scored, read.held if new > 1 else 0
