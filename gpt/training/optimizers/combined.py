"""Several optimizers that step as one."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import StateDict


class Part(NamedTuple):
    """An optimizer of some weights."""

    optimizer: Optimizer
    state: tuple[str, ...]
    """The tensors that it keeps for each of its weights after a step. A checkpoint holds exactly these."""


class CombinedOptimizer(Optimizer):
    """Several optimizers as one; they share its parameter groups and its state.

    Lightning does not clip gradients for optimizers that unscale float16 gradients themselves, as torch's
    fused ones do. This one leaves unscaling to the loss scaler, so its gradients are clipped.
    """

    def __init__(self, *parts: Part) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.optimizer.param_groups], defaults={})
        self._share()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure() if closure else None
        for part in self.parts:
            part.optimizer.step()
        return loss

    def load_state_dict(self, state_dict: StateDict) -> None:
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        groups = iter(self.param_groups)
        for part in self.parts:
            part.optimizer.state = self.state
            part.optimizer.param_groups = [next(groups) for _ in part.optimizer.param_groups]
