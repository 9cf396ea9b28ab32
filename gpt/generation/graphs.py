"""Steps of decoding on a GPU as CUDA graphs: one launch in the place of some 280 kernels.

The GPU computes a small model's step in less time than Python takes to start its kernels one by one.
"""

import threading
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt.progress import notice

_OFTEN = 4  # times that a graph is wanted until it is recorded; by then libraries have set up what they need
_MOST = 64  # graphs that are kept
_one_at_a_time = threading.Lock()  # PyTorch cannot record two, as the threads of a server may want


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
        self._stream: torch.cuda.Stream | None = None
        self._failed = False

    def __call__(self, key: Hashable, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """function(*inputs), in memory that the next call may overwrite; equal keys are of equal shapes."""
        self._wanted[key] += 1
        with torch.cuda.device(inputs[0].device):
            recorded = self._recorded.pop(key, None) or self._record(key, function, inputs)
            if not recorded:
                return function(*inputs)
            self._recorded[key] = recorded  # the latest is the last
            for held, given in zip(recorded.inputs, inputs, strict=True):
                held.copy_(given)
            recorded.graph.replay()
        if len(self._recorded) > _MOST:
            oldest = next(iter(self._recorded))
            del self._recorded[oldest], self._wanted[oldest]
        return recorded.output

    def _record(
        self, key: Hashable, function: Callable[..., Tensor], inputs: tuple[Tensor, ...]
    ) -> _Recorded | None:
        """None where it is not wanted often enough, or cannot be done."""
        if self._wanted[key] < _OFTEN or self._failed:
            return None
        graph, held = torch.cuda.CUDAGraph(), tuple(given.clone() for given in inputs)
        self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        pool = next((one.graph.pool() for one in self._recorded.values()), None)  # of one memory, in turn
        back = torch.cuda.stream(torch.cuda.current_stream())  # also where the recording fails
        recording = torch.cuda.graph(graph, pool, self._stream, "thread_local")  # a server's threads go on
        try:
            with _one_at_a_time, back, recording:
                output = function(*held)
        except RuntimeError as error:
            self._failed = True
            cause: BaseException = error
            while cause.__context__:  # the end of the recording fails because of the operation that did
                cause = cause.__context__
            reason = str(cause).partition("\n")[0]
            notice(f"decoding is slower than it could be: its CUDA graph cannot be recorded: {reason}")
            return None
        return _Recorded(graph, held, output)
