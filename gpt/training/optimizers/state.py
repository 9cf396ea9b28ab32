"""An optimizer's state as named tensors, and back: what a checkpoint holds of it."""

from collections.abc import Iterator

from torch import Tensor, nn
from torch.optim import Optimizer

from gpt.training.optimizers.combined import CombinedOptimizer
from gpt.training.optimizers.master_weights import MasterWeights

Names = dict[Tensor, str]  # of the parameters


def tensors_of(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """The state's tensors as WEIGHT/STATE, WEIGHT/master for a float32 master."""
    names = _names(model, optimizer)
    found = {
        f"{names[parameter]}/{key}": value
        for part in _parts(optimizer)
        for parameter, state in part.state.items()
        for key, value in state.items()
    }
    masters = optimizer.masters if isinstance(optimizer, MasterWeights) else []
    return found | {f"{names[master]}/master": master for master in masters}


def places(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, Tensor, dict[str, Tensor]]]:
    """Each weight's name, its parameter or master, and the state to fill in."""
    names = _names(model, optimizer)
    for part in _parts(optimizer):
        for group in part.param_groups:
            for parameter in group["params"]:
                yield names[parameter], parameter, part.state[parameter]


def _parts(optimizer: Optimizer) -> Iterator[Optimizer]:
    """The optimizers that keep a state of their own."""
    if not isinstance(optimizer, CombinedOptimizer):
        yield optimizer
        return
    for part in optimizer.parts:
        yield from _parts(part)


def _names(model: nn.Module, optimizer: Optimizer) -> Names:
    names: Names = {parameter: name for name, parameter in model.named_parameters()}
    if isinstance(optimizer, MasterWeights):
        masters = zip(optimizer.masters, optimizer.weights, strict=True)
        names |= {master: names[weight] for master, weight in masters}
    return names
