"""Float32 masters of bfloat16 weights."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gpt.training.optimizers.combined import Closure, CombinedOptimizer, closure_loss


class MasterWeights(CombinedOptimizer):
    """Steps float32 copies of bfloat16 weights with the optimizer that `build` makes of them.

    A bfloat16 has 8 bits of mantissa: an update below 1/256 of a weight would be rounded away. The copies
    accumulate such small updates (Micikevicius et al. 2018, section 3.1).
    """

    def __init__(self, named: dict[str, Tensor], build: Callable[[dict[str, Tensor]], Optimizer]) -> None:
        self.weights = list(named.values())
        copies = {name: weight.detach().float().requires_grad_() for name, weight in named.items()}
        self.masters = list(copies.values())
        super().__init__(build(copies))

    @torch.no_grad()
    def step(self, closure: Closure = None) -> Any:
        """Step the masters with the weights' gradients, free these, and round the masters to the weights."""
        loss = closure_loss(closure)
        for weight, master in zip(self.weights, self.masters, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None  # so that each gradient is in memory once, not in both types
        super().step()
        super().zero_grad()
        torch._foreach_copy_(self.weights, self.masters)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free the weights' gradients; the masters' exist only within `step`."""
        for weight in self.weights:
            weight.grad = None

    def state_dict(self) -> dict[str, Any]:
        (inner,) = super().state_dict()["parts"]
        return {"masters": [master.detach() for master in self.masters], "inner": inner}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        torch._foreach_copy_(self.masters, state_dict["masters"])
        super().load_state_dict({"parts": [state_dict["inner"]]})
