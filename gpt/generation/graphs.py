"""Steps of decoding on a GPU as CUDA graphs: one launch in the place of some hundred kernels.

The GPU computes a small model's step in less time than Python takes to start its kernels one by one.
"""

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt.progress import notice

_OFTEN = 4  # times that a graph is wanted until it is recorded; by then libraries have set up what they need
_MOST = 64  # graphs that are kept


@dataclass(frozen=True, eq=False)
class _Recorded:
    """A computation, with the tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    output: Tensor


class Graphs:
    """Computes functions of tensors, from the fourth time on by a graph that was recorded of the function.

    Such a function neither reads values on the host nor moves any to the device. It may read and write other
    tensors, at addresses that its key stands for.
    """

    def __init__(self) -> None:
        self._wanted: Counter[Hashable] = Counter()
        self._recorded: dict[Hashable, _Recorded] = {}
        self._failed = False

    def __call__(self, key: Hashable, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """function(*inputs), in memory that the next call may overwrite; equal keys are of equal shapes."""
        self._wanted[key] += 1
        recorded = self._recorded.pop(key, None)
        if not recorded and self._wanted[key] >= _OFTEN and not self._failed:
            try:
                recorded = self._record(function, inputs)
            except RuntimeError as error:
                self._failed = True
                reason = str(error).partition("\n")[0]
                notice(f"decoding is slower than it could be: its CUDA graph cannot be recorded: {reason}")
        if not recorded:
            return function(*inputs)
        self._recorded[key] = recorded  # the latest is the last
        if len(self._recorded) > _MOST:
            del self._recorded[next(iter(self._recorded))]
        for held, given in zip(recorded.inputs, inputs, strict=True):
            held.copy_(given)
        recorded.graph.replay()
        return recorded.output

    def _record(self, function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> _Recorded:
        held = tuple(given.clone() for given in inputs)
        graph = torch.cuda.CUDAGraph()
        pool = next((one.graph.pool() for one in self._recorded.values()), None)  # of one memory, in turn
        # Other threads, as those of a server, may use the GPU meanwhile.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            output = function(*held)
        return _Recorded(graph, held, output)
