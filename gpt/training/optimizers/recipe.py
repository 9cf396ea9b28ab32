"""The optimizer's settings: AdamW, or Muon for the blocks' matrices with AdamW for the rest."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from gpt.errors import InputError, check_least
from gpt.training.optimizers.combined import CombinedOptimizer, Part
from gpt.training.optimizers.muon import StackedMuon
from gpt.training.schedule import Schedule

_ADAMW_STATE = ("exp_avg", "exp_avg_sq", "step")
_MUON_STATE = ("momentum_buffer",)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer's settings; InputError for a value outside its range."""

    name: Literal["muon", "adamw"] = "muon"
    """muon: Muon for the blocks' matrices, AdamW for the other weights. adamw: AdamW for all."""
    lr: float = 5e-3
    """Peak learning rate of the blocks' matrices. Muon's updates are scaled to AdamW's (Liu et al. 2025).
    Elsewhere: learning_rate."""
    rest_lr: float | None = None
    """Peak learning rate of the other weights; null takes `lr`."""
    weight_decay: float = 0.0
    """Decoupled weight decay of the blocks' matrices. Norms and biases do not decay."""
    embedding_weight_decay: float = 0.0
    """Decoupled weight decay of the embeddings, useful for several epochs."""
    momentum: float = 0.95
    """Muon's momentum. Rare."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates for the first and second moments. Rare."""
    warmup_steps: int = 50
    """Steps over which the learning rate rises to its peak, which a shorter run never reaches.
    Elsewhere: warmup_iters, warmup_ratio."""
    schedule: Schedule = "linear"
    """How the learning rate falls after the warmup. Elsewhere: lr_scheduler_type."""
    final_lr_fraction: float = 0.0
    """Learning rate after the last update, as a fraction of the peak. Rare. Elsewhere: min_lr."""

    def __post_init__(self) -> None:
        names = "lr", "rest_lr", "weight_decay", "embedding_weight_decay", "warmup_steps"
        check_least(0, **{name: getattr(self, name) for name in names})
        for name in ("momentum", "final_lr_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"{name} must be in [0, 1], got {getattr(self, name)}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise InputError(f"betas must be in [0, 1), got {self.betas}")


def build_optimizer(model: nn.Module, config: OptimizerConfig, precision: str = "") -> CombinedOptimizer:
    """Build the optimizer for a GPT's weights.

    Muon orthogonalises in bfloat16 if the Trainer's `precision` names it, else in float32.
    """
    dtype = torch.bfloat16 if "bf16" in precision else torch.float32
    # A tied head is included once. With adapters, only they are trained.
    named: dict[str, Tensor] = {name: w for name, w in model.named_parameters() if w.requires_grad}
    matrices = [weight for name, weight in named.items() if name.startswith("blocks.") and weight.dim() == 2]
    embeddings = [w for name, w in named.items() if not name.startswith("blocks.") and w.dim() == 2]
    vectors = [weight for weight in named.values() if weight.dim() != 2]  # norms and biases
    rest_lr = config.lr if config.rest_lr is None else config.rest_lr
    main = {"params": matrices, "lr": config.lr, "weight_decay": config.weight_decay}
    rest = [
        {"params": embeddings, "lr": rest_lr, "weight_decay": config.embedding_weight_decay},
        {"params": vectors, "lr": rest_lr, "weight_decay": 0.0},
    ]
    if config.name == "adamw":
        adamw = AdamW([main, *rest], betas=config.betas, fused=True)
        return CombinedOptimizer(Part(adamw, _ADAMW_STATE))
    muon = StackedMuon([main], dtype=dtype, momentum=config.momentum)
    adamw = AdamW(rest, betas=config.betas, fused=True)
    return CombinedOptimizer(Part(muon, _MUON_STATE), Part(adamw, _ADAMW_STATE))
