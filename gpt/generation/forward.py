"""PyTorch's way to compute tokens: the model's own `forward`, with its caches where these change nothing.

Shapes: N rows, T tokens of each, V vocab_size, R reads.
"""

import inspect
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from gpt.generation.cache import LayerCache, Read, RowCache
from gpt.generation.graphs import replayed
from gpt.model import GPT


def to_device(numbers: Sequence[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Numbers as a tensor, without a wait for what a GPU is doing."""
    return torch.tensor(numbers, dtype=dtype).to(device, non_blocking=device.type == "cuda")


class Forward:
    """Calls `model.forward`. Logits are close, not equal bit for bit, whatever is read beside a text.

    Args:
        model: computes in evaluation mode, whatever mode it is in.
        cached: whether to give it caches; without, a read is of a whole window.
        graphs: on a GPU, replay recordings of steps.
    """

    def __init__(self, model: GPT, *, cached: bool, graphs: bool = False) -> None:
        self.model, self.config, self.cached = model, model.config, cached
        weight = next(one for one in model.parameters() if one.is_floating_point())
        self.like = weight.detach()  # what caches are like
        self.graphs = graphs and cached and weight.is_cuda
        self._takes_last = "last" in inspect.signature(model.forward).parameters
        if weight.is_cuda:
            # PyTorch's first choice on a Hopper GPU builds a plan, up to a second, for every shape.
            torch.backends.cuda.enable_cudnn_sdp(False)

    def read(self, reads: Sequence[Read]) -> Tensor:
        """The logits (R, V) of the tokens to be scored."""
        found: list[Tensor] = []
        for read in reads:
            tokens = to_device([list(read.tokens)], self.like.device)
            caches = [LayerCache(layer[:, None], read.held) for layer in read.store] if self.cached else None
            found += self.logits(tokens, read.scored, caches=caches)
        return torch.cat(found)

    def step(self, tokens: Tensor, cache: RowCache) -> Tensor:
        """Append a token (N,) to each row of the cache; the logits (N, V) after them, until the next call."""

        def compute(tokens: Tensor, held: Tensor) -> Tensor:
            return self.logits(tokens[:, None], 1, **cache.inputs(held))[:, -1]

        inputs = tokens, to_device(cache.append(), tokens.device)
        return replayed(cache.recorded, cache.shape, compute, *inputs) if self.graphs else compute(*inputs)

    def logits(self, tokens: Tensor, last: int, **inputs: Any) -> Tensor:
        """Those of the last so many of tokens (N, T): (N, last, V). The fewer, the cheaper."""
        if self._takes_last:
            inputs["last"] = last
        with ExitStack() as stack:
            if self.model.training:
                self.model.eval()
                stack.callback(self.model.train)
            if any(one._compiled_call_impl for one in self.model.modules()):
                # Compiled for training, it would be compiled anew for each length of a text.
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            given = {name: value for name, value in inputs.items() if value is not None}
            return self.model(tokens, **given)[:, -last:]
