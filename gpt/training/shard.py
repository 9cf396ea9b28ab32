"""FSDP2: weights, gradients and optimizer states spread over the processes.

PyTorch's part is imported where it is used: that takes a second, of which other runs would have nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import ModelParallelStrategy
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.optim import Optimizer

from gpt.model import GPT

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


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
        try:
            yield
        finally:
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

        saved = self.checkpoint_io.load_checkpoint(self.broadcast(checkpoint_path))
        assert self.model is not None
        set_model_state_dict(self.model, saved["state_dict"], options=StateDictOptions(full_state_dict=True))
        for optimizer, state in zip(self.optimizers, saved["optimizer_states"], strict=False):
            optimizer.load_state_dict(_parts(state, optimizer))
        return saved


def _parts(state: dict[str, Any], optimizer: Any) -> dict[str, Any]:
    if "masters" in state:
        masters = zip(state["masters"], optimizer.masters, strict=True)
        inner = _parts(state["inner"], optimizer.parts[0])
        return {"masters": [_part(whole, like) for whole, like in masters], "inner": inner}
    if "parts" in state:
        return {"parts": list(map(_parts, state["parts"], optimizer.parts))}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = {
        number: {name: _part(value, parameters[number]) for name, value in values.items()}
        for number, values in state["state"].items()
    }
    return {**state, "state": states}


def _part(whole: Any, like: Any) -> Any:
    """This process's rows of a tensor of the shape of `like`; anything else as it is."""
    if not isinstance(whole, Tensor) or whole.shape != like.shape:
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def shard(model: GPT, mesh: "DeviceMesh") -> None:
    """Shard each block by itself, so that only one at a time is whole in memory, and then the rest."""
    if is_sharded(model):
        return
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    for block in [*model.blocks, model]:
        fully_shard(block, mesh=mesh)
    register_fsdp_forward_method(model, "features")  # what training calls in the place of `forward`


def is_sharded(model: GPT) -> bool:
    """Whether each process has a part of the weights."""
    return hasattr(model, "set_requires_gradient_sync")  # as FSDPModule has
