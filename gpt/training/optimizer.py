"""AdamW, or Muon on the blocks' matrices with AdamW for the rest, behind one Optimizer.

Shapes: N matrices of one shape, (R, C) each.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from gpt.errors import InputError
from gpt.training.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The recipe of the weights' updates.

    Raises:
        InputError: a rate, momentum or fraction outside its range.
    """

    name: Literal["muon", "adamw"] = "muon"
    """muon: Muon for the blocks' matrices, AdamW for the other weights. adamw: AdamW for all."""
    lr: float = 5e-3
    """Peak learning rate of the blocks' matrices, on AdamW's scale for Muon too (Liu et al. 2025)."""
    rest_lr: float | None = None
    """Peak learning rate of everything else; None takes `lr`."""
    weight_decay: float = 0.0
    """Decoupled decay of the blocks' matrices. Norms and biases do not decay."""
    embedding_weight_decay: float = 0.0
    """Decoupled decay of the embeddings: worth something where a text is read several times."""
    momentum: float = 0.95
    """Muon's momentum."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    warmup_steps: int = 50
    """Steps over which the learning rate climbs to its peak."""
    schedule: Schedule = "linear"
    """How it falls afterwards, see `learning_rate_factor`."""
    final_lr_fraction: float = 0.0
    """What is left of the peak at the last step."""
    decay_fraction: float = 0.2
    """Share of the steps over which "wsd" decays."""

    def __post_init__(self) -> None:
        for name in ("lr", "rest_lr", "weight_decay", "embedding_weight_decay", "warmup_steps"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise InputError(f"{name} must be at least 0, got {value}")
        for name in ("momentum", "final_lr_fraction", "decay_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"{name} must be in [0, 1], got {getattr(self, name)}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise InputError(f"betas must be in [0, 1), got {self.betas}")


class StackedMuon(Muon):
    """`torch.optim.Muon` that orthogonalises all matrices of one shape in one batched product.

    The same update to rounding, with a fraction of the calls: a small model's step is bound by their number.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every matrix that has a gradient; `closure`, if given, is called first for the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append(parameter)
            for parameters in by_shape.values():
                self._update(parameters, group)
        return loss

    def _update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        momenta = []
        for parameter, gradient in zip(parameters, gradients, strict=True):
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(gradient)
            momenta.append(state["momentum_buffer"])
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        if group["nesterov"]:
            momenta = list(torch._foreach_lerp(gradients, momenta, group["momentum"]))
        updates = orthogonalise(
            torch.stack(momenta), group["ns_coefficients"], group["ns_steps"], group["eps"]
        )  # (N, R, C)
        rows, columns = parameters[0].shape
        scale = 0.2 * max(rows, columns) ** 0.5  # so that an entry's update is as large as AdamW's
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(parameters, list(updates.to(parameters[0].dtype)), alpha=-group["lr"] * scale)


def orthogonalise(
    matrices: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """The nearest semi-orthogonal matrix of each, roughly: (N, R, C) -> (N, R, C) in bfloat16.

    A quintic Newton-Schulz iteration pulls the singular values towards one (Jordan et al. 2024, "Muon: An
    optimizer for hidden layers in neural networks").
    """
    a, b, c = coefficients
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.bfloat16()
    x = x.mT if tall else x  # the Gram matrix is that of the shorter side
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if tall else x


class CombinedOptimizer(Optimizer):
    """Several optimizers that step as one.

    The parameter groups are the parts' own, so that a scheduler or gradient clipping, which know one
    optimizer, reach them all.
    """

    def __init__(self, *parts: Optimizer) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], defaults={})

    @property
    def state(self) -> Any:
        """The parts' state by parameter, to read: the parts keep it."""
        return {parameter: state for part in self.parts for parameter, state in part.state.items()}

    @state.setter
    def state(self, value: Any) -> None:
        """What the base class does when it starts, with nothing in it."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every part; `closure`, if given, is called once, first, for the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The parts' state dicts, in order."""
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        # Loading gives a part new groups.
        self.param_groups = [group for part in self.parts for group in part.param_groups]


class MasterWeights(Optimizer):
    """Keeps float32 copies of bfloat16 weights, and has another optimizer step those.

    A bfloat16 has 8 bits of mantissa: an update below a 256th of a weight would be rounded away. The copies
    add up what is too small for the weights themselves (Micikevicius et al. 2018, section 3.1).

    Args:
        named: the weights by name.
        build: makes the optimizer of the float32 copies, which it is given under the same names.
    """

    def __init__(self, named: dict[str, Tensor], build: Callable[[dict[str, Tensor]], Optimizer]) -> None:
        self.weights = list(named.values())
        copies = {name: weight.detach().float().requires_grad_() for name, weight in named.items()}
        self.masters = list(copies.values())
        self.inner = build(copies)
        super().__init__(self.inner.param_groups, defaults={})

    @property
    def state(self) -> Any:
        """The inner optimizer's state, by master weight."""
        return self.inner.state

    @state.setter
    def state(self, value: Any) -> None:
        """What the base class does when it starts, with nothing in it."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the masters with the weights' gradients, which that takes away, and round the result."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for weight, master in zip(self.weights, self.masters, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None  # at most one whole set of gradients in float32, and none beside it
        self.inner.step()
        for master in self.masters:
            master.grad = None
        torch._foreach_copy_(self.weights, self.masters)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the weights' gradients; the masters' live only within `step`."""
        for weight in self.weights:
            if set_to_none:
                weight.grad = None
            elif weight.grad is not None:
                weight.grad.zero_()

    def state_dict(self) -> dict[str, Any]:
        """The masters and the inner optimizer's state dict."""
        return {"masters": [master.detach() for master in self.masters], "inner": self.inner.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        for master, saved in zip(self.masters, state_dict["masters"], strict=True):
            master.copy_(saved)
        self.inner.load_state_dict(state_dict["inner"])
        self.param_groups = self.inner.param_groups  # loading gives it new ones


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    """The optimizer for a GPT's weights, with float32 masters where the weights are bfloat16.

    Its parameter groups are the blocks' matrices, the embeddings, and norms and biases.
    """
    named: dict[str, Tensor] = dict(model.named_parameters())  # the tied head counts once
    if any(weight.dtype == torch.bfloat16 for weight in named.values()):
        return MasterWeights(named, lambda copies: _build(copies, config))
    return _build(named, config)


def _build(named: dict[str, Tensor], config: OptimizerConfig) -> Optimizer:
    is_matrix = {name: name.startswith("blocks.") and weight.dim() == 2 for name, weight in named.items()}
    matrices = [weight for name, weight in named.items() if is_matrix[name]]
    others = [weight for name, weight in named.items() if not is_matrix[name]]
    rest_lr = config.lr if config.rest_lr is None else config.rest_lr
    rest = [
        {
            "params": [weight for weight in others if weight.dim() == 2],  # embeddings, a head of its own
            "lr": rest_lr,
            "weight_decay": config.embedding_weight_decay,
        },
        {"params": [weight for weight in others if weight.dim() != 2], "lr": rest_lr, "weight_decay": 0.0},
    ]
    if config.name == "adamw":
        groups = [{"params": matrices, "lr": config.lr, "weight_decay": config.weight_decay}, *rest]
        return AdamW(groups, betas=config.betas, fused=True)
    muon = StackedMuon(
        matrices,
        lr=config.lr,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    return CombinedOptimizer(muon, AdamW(rest, betas=config.betas, fused=True))
