"""Processes that train one model together: each holds a replica of it, and the gradients are averaged."""

from collections.abc import Callable
from typing import TypeVar

import torch
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor

from gpt.errors import InputError
from gpt.weights.formats.table import Weights

_Result = TypeVar("_Result")
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes


def data_parallel() -> DDPStrategy:
    """Return PyTorch's DistributedDataParallel, which averages gradients while others are still computed.

    Buffers are not broadcast: the model's only ones are its causal masks, which are equal in all processes.
    """
    return DDPStrategy(broadcast_buffers=False)


def on_first(strategy: Strategy, act: Callable[[], _Result]) -> _Result:
    """Call `act` on the first process and return its result on all; if it fails, all raise its error."""
    outcome: tuple[_Result | None, Exception | None] = (None, None)
    if strategy.is_global_zero:
        try:
            outcome = act(), None
        except Exception as error:
            outcome = None, error
    result, failure = strategy.broadcast(outcome)
    if failure:
        raise failure
    return result  # type: ignore[return-value] # it is what `act` has returned


def check_replicas(tensors: Weights, step: int) -> None:
    """Raise InputError on all processes if the tensors of one differ in any bit from the first process's.

    Each process calls this with the tensors that a checkpoint would hold. Equal gradients keep replicas equal
    to the last bit. Replicas that have drifted apart never become equal again, and only the first one's
    weights are saved.
    """
    own = checksums(tensors)
    every: list[dict[str, int]] = [{}] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, own)
    for rank, other in enumerate(every):
        if different := [name for name in every[0] | other if every[0].get(name) != other.get(name)]:
            what = f"process {rank} has other values than process 0 after step {step}, in {different[0]}"
            how = "the last checkpoint is good; resume it, and look for a faulty device or unlike ones"
            raise InputError(f"{what} and {len(different) - 1} more: stopped without saving, {how}")


def checksums(tensors: Weights) -> dict[str, int]:
    """Return, by name, the sum of each tensor's bits read as integers, which any changed value changes."""
    if not tensors:
        return {}
    sums = torch.stack([_bits(tensor).sum(dtype=torch.int64).cpu() for tensor in tensors.values()])
    return dict(zip(tensors, sums.tolist(), strict=True))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(_INTEGERS[tensor.element_size()])
