"""FSDP2: weights, gradients and optimizer states spread over the processes.

PyTorch's part is imported where it is used: that takes a second, of which other runs would have nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from gpt.model import GPT


class ShardedStrategy(ModelParallelStrategy):
    """`--trainer.strategy fsdp2`: ModelParallelStrategy over all processes.

    A checkpoint is one file, which resumes on any number of processes, with or without sharding.
    """

    def __init__(self) -> None:
        super().__init__(tensor_parallel_size=1, save_distributed_checkpoint=False)

    def setup_environment(self) -> None:
        """Shard over every process there is; Lightning's default shards over the nodes."""
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Let gradients accumulate whole, so that they are reduced once in an update."""
        model: Any = self.lightning_module.model  # type: ignore[union-attr]
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)


def whole(tensor: Any) -> Tensor:
    """All of a tensor of which each process may have a part; call it on all processes."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def part_of(tensor: Tensor, like: Any) -> Tensor:
    """The rows of a whole tensor that this process has of `like`; all of it where that is not sharded."""
    if not hasattr(like, "device_mesh") or not tensor.dim():
        return tensor.to(like.device)
    from torch.distributed.tensor import Shard, distribute_tensor

    return distribute_tensor(tensor.to(like.device), like.device_mesh, [Shard(0)], src_data_rank=None)


def shard(model: GPT, mesh: DeviceMesh, precision: str) -> None:
    """Shard each block by itself, so that only one at a time is whole in memory, and then the rest.

    GPUs exchange weights in bfloat16 where the Trainer's `precision` computes in it anyway: half the bytes.
    Gradients are summed in float32. CPUs exchange float32, and so equal one process to the last bit.
    """
    if is_sharded(model):
        return
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    policy = MixedPrecisionPolicy()
    if mesh.device_type == "cuda" and precision == "bf16-mixed":
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for block in [*model.blocks, model]:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    register_fsdp_forward_method(model, "features")  # what training calls in the place of `forward`


def is_sharded(model: GPT) -> bool:
    """Whether each process has a part of the weights."""
    return hasattr(model, "set_requires_gradient_sync")  # as FSDPModule has
