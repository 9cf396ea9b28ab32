"""Optimizers that step as one."""

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
    """Steps its parts as one; they work on its parameter groups and its state.

    To the loss scale of float16 it is one that leaves scaling alone, as a fused one of torch does not, whose
    gradients Lightning would not clip.
    """

    def __init__(self, *parts: Optimizer) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], defaults={})
        self._share()

    def step(self, closure: Closure = None) -> Any:
        loss = closure_loss(closure)
        for part in self.parts:
            part.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        groups = iter(self.param_groups)
        for part in self.parts:
            part.state = self.state
            part.param_groups = [next(groups) for _ in part.param_groups]
