"""FSDP2: weights, gradients and optimizer states spread over the processes."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
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

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Whole states, numbered as the optimizer numbers its parameters; empty on all processes but one.

        Lightning numbers them as the model does, which is another order where they are in several groups.
        """
        assert self.model is not None
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state: dict[str, Any] = dict(get_optimizer_state_dict(self.model, optimizer, options=whole))
        names = [name for group in state.get("param_groups", []) for name in group["params"]]
        return _renamed(state, {name: number for number, name in enumerate(names)}) if names else {}

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read it on every process, and keep each process's part."""
        saved = self.checkpoint_io.load_checkpoint(self.broadcast(checkpoint_path))
        assert self.model is not None
        whole = StateDictOptions(full_state_dict=True)
        set_model_state_dict(self.model, saved["state_dict"], options=whole)
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        for optimizer, state in zip(self.optimizers, saved["optimizer_states"], strict=False):
            ordered = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
            named = _renamed(state, dict(enumerate(ordered)))
            set_optimizer_state_dict(self.model, optimizer, named, options=whole)
        return saved


def _renamed(state: dict[str, Any], names: Mapping[Any, Any]) -> dict[str, Any]:
    """An optimizer's state dict with other names for its parameters."""
    groups = [{**group, "params": [names[old] for old in group["params"]]} for group in state["param_groups"]]
    return {"state": {names[old]: value for old, value in state["state"].items()}, "param_groups": groups}


def shard(model: GPT, mesh: DeviceMesh) -> None:
    """Shard each block by itself, so that only one at a time is whole in memory, and then the rest."""
    if is_sharded(model):
        return
    for block in [*model.blocks, model]:
        fully_shard(block, mesh=mesh)
    register_fsdp_forward_method(model, "features")  # what training calls in the place of `forward`


def is_sharded(model: GPT) -> bool:
    """Whether each process has a part of the weights."""
    return isinstance(model, FSDPModule)
