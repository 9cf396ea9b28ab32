"""An optimizer's state as named tensors, and back: what a checkpoint holds of it."""

from collections.abc import Iterator

from torch import Tensor, nn
from torch.optim import Optimizer

from gpt.training.optimizers.combined import CombinedOptimizer

Names = dict[Tensor, str]  # of the parameters


def tensors_of(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """The state's tensors as WEIGHT/STATE."""
    names = _names(model)
    return {
        f"{names[parameter]}/{key}": value
        for part in _parts(optimizer)
        for parameter, state in part.state.items()
        for key, value in state.items()
    }


def places(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, Tensor, dict[str, Tensor]]]:
    """Each weight's name, the weight, and the state to fill in."""
    names = _names(model)
    for part in _parts(optimizer):
        for group in part.param_groups:
            for parameter in group["params"]:
                yield names[parameter], parameter, part.state[parameter]


def _parts(optimizer: Optimizer) -> Iterator[Optimizer]:
    """The optimizers that keep a state of their own."""
    yield from optimizer.parts if isinstance(optimizer, CombinedOptimizer) else [optimizer]


def _names(model: nn.Module) -> Names:
    return {parameter: name for name, parameter in model.named_parameters()}
