"""FSDP2: weights, gradients and optimizer states spread over the processes.

PyTorch's part is imported where it is used: that takes a second, of which other runs would have nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

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

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state dict with whole tensors, as without sharding; empty on all processes but one."""
        from torch.distributed.tensor import DTensor

        def whole(part: DTensor) -> Tensor | None:
            tensor = part.full_tensor()
            return tensor.cpu() if self.is_global_zero else None

        state: dict[str, Any] = apply_to_collection(optimizer.state_dict(), DTensor, whole)
        return state if self.is_global_zero else {}

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
        from torch.distributed.tensor import Shard, distribute_tensor

        def rows(whole: Tensor) -> Tensor:
            """This process's rows of a weight, master or moment; a count of steps as it is."""
            mesh = self.device_mesh["data_parallel"]
            return distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None) if whole.dim() else whole

        saved = self.checkpoint_io.load_checkpoint(self.broadcast(checkpoint_path))
        assert self.model is not None
        set_model_state_dict(self.model, saved["state_dict"], options=StateDictOptions(full_state_dict=True))
        for optimizer, state in zip(self.optimizers, saved["optimizer_states"], strict=False):
            optimizer.load_state_dict(apply_to_collection(state, Tensor, rows))
        return saved


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
