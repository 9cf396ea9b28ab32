"""Several optimizers that step as one."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

Closure = Callable[[], Any] | None


def closure_loss(closure: Closure) -> Any:
    """What a step's closure returns, called with gradients on; None without a closure."""
    with torch.enable_grad():
        return closure() if closure else None


class CombinedOptimizer(Optimizer):
    """Steps its parts as one, and shares their parameter groups: a scheduler reaches all of them."""

    def __init__(self, *parts: Optimizer) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], defaults={})

    @property
    def state(self) -> Any:
        """The parts' state by parameter, for reading: the parts keep it."""
        return {parameter: state for part in self.parts for parameter, state in part.state.items()}

    @state.setter
    def state(self, value: Any) -> None:
        """Ignore the empty state that the base class sets in its constructor."""

    def step(self, closure: Closure = None) -> Any:
        loss = closure_loss(closure)
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [group for part in self.parts for group in part.param_groups]  # new ones
