"""Training of low-rank adapters (LoRA, Hu et al. 2021) through peft, the other weights fixed."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from gpt.errors import InputError, check_least
from gpt.weights.adapters import LAYERS


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """Adapters beside the matrices of attention and feed-forward; InputError for a value out of its range."""

    rank: int = 0
    """Rank of the adapters; 0 trains all weights."""
    alpha: float = 16.0
    """The adapters' output is multiplied by alpha / rank. Rare."""
    dropout: float = 0.0
    """Of the adapters' input. Rare."""

    def __post_init__(self) -> None:
        check_least(0, rank=self.rank)
        if not self.alpha > 0:
            raise InputError(f"alpha must be above 0, got {self.alpha}")
        if not 0 <= self.dropout < 1:
            raise InputError(f"dropout must be in [0, 1), got {self.dropout}")


def add_adapters(model: nn.Module, config: LoRAConfig) -> None:
    """Add adapters that change nothing yet, and fix the other weights; InputError without peft."""
    try:
        import peft
    except ImportError:
        raise InputError("model.lora needs one more package: pip install -e '.[lora]'") from None
    alpha: Any = config.alpha  # which peft annotates as an int
    adapters = peft.LoraConfig(
        r=config.rank, lora_alpha=alpha, lora_dropout=config.dropout, target_modules=list(LAYERS)
    )
    peft.inject_adapter_in_model(adapters, model)
