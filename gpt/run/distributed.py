"""Processes that train one model together: each holds a replica of it, and the gradients are averaged."""

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from gpt.errors import InputError
from gpt.weights.formats.table import Weights

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by their bytes


def data_parallel() -> DDPStrategy:
    """PyTorch's DistributedDataParallel, which sums gradients while others are computed.

    The model's only buffers are its causal masks, which are the same everywhere: they are not sent around.
    """
    return DDPStrategy(broadcast_buffers=False)


def check_replicas(tensors: Weights, step: int) -> None:
    """An InputError on all processes where one of them has other bits in its tensors than the first.

    Each process calls it, with what a checkpoint would hold. Equal gradients keep replicas equal to the last
    bit; nothing would bring them together again, and only the first one's are saved.
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
    """The sum of each tensor's bits, read as integers, by name: a value that changes changes it."""
    if not tensors:
        return {}
    sums = torch.stack([_bits(tensor).sum(dtype=torch.int64).cpu() for tensor in tensors.values()])
    return dict(zip(tensors, sums.tolist(), strict=True))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(_INTEGERS[tensor.element_size()])
