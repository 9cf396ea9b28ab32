"""Train low-rank adapters (LoRA, Hu et al. 2021) with peft, while the other weights are fixed.

All matrices of the blocks get adapters, without an option: which layers have them matters more than their
rank, and all of them are best (Dettmers et al. 2023, "QLoRA", section 4). Adapting only some layers would
be one more setting for checkpoints, exports and loaders.
"""

from dataclasses import dataclass

from torch import nn

from gpt.errors import check_least, missing_extra
from gpt.weights.adapters import LAYERS

ALPHA = 16
"""The adapters' output is multiplied by `ALPHA` / rank."""


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """Adapters of the matrices in attention and feed-forward; InputError for a rank below 0."""

    rank: int = 0
    """Rank of the adapters; 0 trains all weights."""

    def __post_init__(self) -> None:
        check_least(0, rank=self.rank)


def add_adapters(model: nn.Module, rank: int) -> None:
    """Add adapters that do not change the output yet, and fix the other weights; InputError without peft."""
    try:
        import peft
    except ImportError:
        raise missing_extra("model.lora", "lora") from None
    adapters = peft.LoraConfig(r=rank, lora_alpha=ALPHA, target_modules=list(LAYERS))
    peft.inject_adapter_in_model(adapters, model)
