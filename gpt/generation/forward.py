"""PyTorch's way to compute tokens: the model's own `forward`, with its caches where these change nothing.

Shapes: N rows, T tokens of each, S columns of their cache, V vocab_size, R tokens that are scored.
"""

import inspect
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from gpt.generation.cache import Cache, Read, Rows
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

    def read(self, reads: Sequence[Read], cache: Cache) -> Tensor:
        """The logits (R, V) of the tokens to be scored; single tokens of neighbouring rows are one batch."""
        batches: list[list[Read]] = []
        for read in reads:
            last = batches[-1][-1] if batches else read
            is_next = self.cached and read.row == last.row + 1
            if is_next and len(read.tokens) == len(last.tokens) == 1:
                batches[-1].append(read)
            else:
                batches.append([read])
        return torch.cat([self._batch(batch, cache) for batch in batches])

    def _batch(self, reads: Sequence[Read], cache: Cache) -> Tensor:
        tokens = to_device([list(read.tokens) for read in reads], self.like.device)
        if not self.cached:
            return self.logits(tokens, reads[0].scored)[0]
        held = [read.held for read in reads]
        return self.append(tokens, held, cache, reads[0].row, reads[0].scored).flatten(0, 1)

    def append(self, tokens: Tensor, held: list[int], cache: Cache, first: int = 0, last: int = 1) -> Tensor:
        """Append tokens (N, T) to the rows from `first` on; the logits (N, last, V), until the next call.

        Several tokens are of one row. A step is recorded for each shape: its columns are a power of two.
        """
        rows, new = tokens.shape
        recorded = self.graphs and new == 1 and first == 0
        columns = max(held) + new
        if recorded:
            columns = min(max(64, 1 << (columns - 1).bit_length()), cache.store.shape[4])
        even = not recorded and min(held) + new == columns
        store = cache.store[:, :, first : first + rows, :, :columns]  # (layers, 2, N, H, S, K)

        def compute(tokens: Tensor, held: Tensor) -> Tensor:
            places = torch.arange(columns, device=held.device)
            positions = held[:, None] + places[:new]  # (N, T)
            return self.logits(
                tokens,
                last,
                positions=positions,
                key_padding_mask=None if even else places > held[:, None],  # (N, S)
                caches=[Rows(keys, values, positions) for keys, values in store],
            )

        inputs = tokens, to_device(held, tokens.device)
        return replayed(cache.recorded, (rows, columns), compute, *inputs) if recorded else compute(*inputs)

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
