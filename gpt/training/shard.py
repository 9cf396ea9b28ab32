"""FSDP2: weights, gradients and optimizer states spread over the processes."""

from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

from gpt.model import GPT


class ShardedStrategy(ModelParallelStrategy):
    """`--trainer.strategy fsdp2`: ModelParallelStrategy over all processes, with checkpoints of one file.

    Such a checkpoint does not say how many processes wrote it, and resumes on another number of them, with
    or without sharding.
    """

    def __init__(self) -> None:
        super().__init__(tensor_parallel_size=1, save_distributed_checkpoint=False)

    def setup_environment(self) -> None:
        """Shard over every process there is; Lightning's default shards over the nodes."""
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()


def shard(model: GPT, mesh: DeviceMesh) -> None:
    """Shard each block by itself, so that only one at a time is whole in memory, and then the rest."""
    if isinstance(model, FSDPModule):
        return
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    register_fsdp_forward_method(model, "features")  # what training calls in the place of `forward`


def is_sharded(model: GPT) -> bool:
    """Whether each process has a part of the weights."""
    return isinstance(model, FSDPModule)
