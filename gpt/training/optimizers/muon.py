"""Muon for all matrices of one shape at once: N of them, (R, C) each."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Muon

from gpt.training.optimizers.combined import Closure, closure_loss


class StackedMuon(Muon):
    """`torch.optim.Muon`, but it orthogonalises all matrices of one shape in one batched product, in `dtype`.

    The update equals that of torch's Muon with `match_rms_adamw`, up to rounding. It takes far fewer calls,
    which dominate the time of a small model's step.
    """

    def __init__(self, params: Any, *, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        super().__init__(params, **options)
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: Closure = None) -> Any:
        loss = closure_loss(closure)
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            for shape in dict.fromkeys(weight.shape for weight in weights):
                self._update([weight for weight in weights if weight.shape == shape], group)
        return loss

    def _update(self, weights: list[Tensor], group: dict[str, Any]) -> None:
        """Update the weights of one shape."""
        for weight in weights:
            if not self.state[weight]:
                self.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
        momenta = [self.state[weight]["momentum_buffer"] for weight in weights]
        gradients: Any = [weight.grad for weight in weights]
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        ahead = torch._foreach_lerp(gradients, momenta, group["momentum"])  # Nesterov momentum
        stack = torch.stack(ahead).to(self.dtype)  # (N, R, C)
        updates = orthogonalise(stack, group["ns_coefficients"], group["ns_steps"], group["eps"])
        scale = 0.2 * max(stack.shape[1:]) ** 0.5  # makes updates as large as AdamW's (Liu et al. 2025)
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(weights, list(updates.to(weights[0].dtype)), alpha=-group["lr"] * scale)


def orthogonalise(matrices: Tensor, coefficients: tuple[float, ...], steps: int, eps: float) -> Tensor:
    """Return roughly the nearest semi-orthogonal matrix to each: (N, R, C) -> (N, R, C).

    A quintic Newton-Schulz iteration pulls the singular values towards one (Jordan et al. 2024, "Muon: An
    optimizer for hidden layers in neural networks").
    """
    a, b, c = coefficients
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices  # makes the products smaller
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if tall else x
