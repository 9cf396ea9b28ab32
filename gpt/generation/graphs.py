"""Steps of decoding on a GPU as CUDA graphs: one launch in the place of some 280 kernels.

The GPU computes a small model's step in less time than Python takes to start its kernels one by one.
"""

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt.progress import notice

_CLOSE = 0.02  # how much logits of a replay may differ, of the largest one: cuBLAS may choose other kernels
_off = threading.Event()
_one_at_a_time = threading.Lock()  # PyTorch cannot record two, as the threads of a server may want


@dataclass(frozen=True, eq=False)
class Recorded:
    """A computation, with the tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    output: Tensor

    def __call__(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """The output for inputs of the same shapes, in memory that the next call overwrites."""
        for held, given in zip(self.inputs, inputs, strict=True):
            held.copy_(given)
        self.graph.replay()
        return self.output


Recordings = dict[Hashable, Recorded | None]


def switch_off() -> None:
    """Record and replay nothing in this process from now on."""
    _off.set()


def replayed(
    recordings: Recordings, key: Hashable, function: Callable[..., Tensor], *inputs: Tensor
) -> Tensor:
    """function(*inputs), by its recording under the key, which is made when it is wanted a second time.

    At the first time libraries set up what they need. The function neither reads values on the host nor moves
    any to the device. It may read and write other tensors, at addresses that its key stands for; to compute
    twice must change nothing. A recording that fails, or whose replay gives another result, switches all off.
    """
    if _off.is_set() or key not in recordings:
        recordings[key] = None
        return function(*inputs)
    with torch.cuda.device(inputs[0].device):
        if recorded := recordings[key]:
            return recorded(inputs)
        try:
            recorded = _record(recordings, function, inputs)
            found, expected = recorded(inputs), function(*inputs)
            if not torch.allclose(found, expected, 0, _CLOSE * float(expected.abs().max()), equal_nan=True):
                raise RuntimeError("a replay gives another result")
            recordings[key] = recorded
        except RuntimeError as error:
            switch_off()
            cause: BaseException = error
            while cause.__context__:  # the end of the recording fails because of the operation that did
                cause = cause.__context__
            reason = str(cause).partition("\n")[0]
            notice(f"decoding is slower than it could be: its CUDA graph cannot be used: {reason}")
            return function(*inputs)
        return expected


def _record(recordings: Recordings, function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Recorded:
    graph, held = torch.cuda.CUDAGraph(), tuple(given.clone() for given in inputs)
    pool = next((one.graph.pool() for one in recordings.values() if one), None)  # of one memory, in turn
    back = torch.cuda.stream(torch.cuda.current_stream())  # also where the recording fails
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    recording = torch.cuda.graph(graph, pool, stream, "thread_local")  # a server's threads go on
    with _one_at_a_time, back, recording:
        output = function(*held)
    return Recorded(graph, held, output)
