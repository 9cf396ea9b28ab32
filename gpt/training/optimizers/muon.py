"""Muon for all matrices of one shape at once: N of them, (R, C) each."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Muon

from gpt.training.device import suits_bfloat16
from gpt.training.optimizers.combined import Closure, closure_loss
from gpt.training.optimizers.shares import by_shape, transform_shared


class StackedMuon(Muon):
    """`torch.optim.Muon` that orthogonalises all matrices of one shape in one batched product.

    The update is the same up to rounding and takes far fewer calls, which dominate a small model's step. Each
    of several processes orthogonalises a share of the matrices. By default that is in bfloat16 except on a
    CPU, of which many are slow at it, and on a GPU that only emulates it.
    """

    def __init__(self, params: Any, *, bfloat16: bool | None = None, **options: Any) -> None:
        super().__init__(params, **options)
        usual = suits_bfloat16(self.param_groups[0]["params"][0].device)
        self.dtype = torch.bfloat16 if (usual if bfloat16 is None else bfloat16) else torch.float32

    @torch.no_grad()
    def step(self, closure: Closure = None) -> Any:
        loss = closure_loss(closure)
        for group in self.param_groups:
            if updated := [parameter for parameter in group["params"] if parameter.grad is not None]:
                self._update(updated, [parameter.grad for parameter in updated], group)
        return loss

    def _update(self, parameters: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> None:
        def orthogonal(stack: Tensor) -> Tensor:
            return orthogonalise(stack, group["ns_coefficients"], group["ns_steps"], group["eps"])

        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        momenta = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        ahead = torch._foreach_lerp(gradients, momenta, group["momentum"])  # Nesterov's
        updates = transform_shared([momentum.to(self.dtype) for momentum in ahead], orthogonal)
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        for same in by_shape(parameters):
            scale = 0.2 * max(parameters[same[0]].shape) ** 0.5  # gives AdamW's size (Liu et al. 2025)
            changed, by = [parameters[n] for n in same], [updates[n].to(parameters[n].dtype) for n in same]
            torch._foreach_add_(changed, by, alpha=-group["lr"] * scale)


def orthogonalise(matrices: Tensor, coefficients: tuple[float, ...], steps: int, eps: float) -> Tensor:
    """The nearest semi-orthogonal matrix of each, roughly: (N, R, C) -> (N, R, C).

    A quintic Newton-Schulz iteration pulls the singular values towards one (Jordan et al. 2024, "Muon: An
    optimizer for hidden layers in neural networks").
    """
    a, b, c = coefficients
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices  # multiply on the shorter side
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if tall else x
