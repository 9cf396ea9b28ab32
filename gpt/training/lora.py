"""Training of low-rank adapters (LoRA, Hu et al. 2021) through peft, the other weights fixed."""

from dataclasses import dataclass

from torch import nn

from gpt.errors import InputError
from gpt.weights.adapters import LAYERS


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """Adapters beside the blocks' matrices: the attention's projections and the feed-forward.

    Raises:
        InputError: a value outside its range.
    """

    rank: int = 0
    """Rank of the adapters; 0 trains all weights."""
    alpha: float = 16.0
    """The adapters' output is multiplied by alpha / rank."""
    dropout: float = 0.0
    """Of the adapters' input."""

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise InputError(f"rank must be at least 0, got {self.rank}")
        if not self.alpha > 0:
            raise InputError(f"alpha must be above 0, got {self.alpha}")
        if not 0 <= self.dropout < 1:
            raise InputError(f"dropout must be in [0, 1), got {self.dropout}")

    @property
    def scale(self) -> float:
        """The factor of the adapters' output."""
        return self.alpha / self.rank


def add_adapters(model: nn.Module, config: LoRAConfig) -> None:
    """Add adapters that change nothing yet, and fix the other weights; InputError without peft."""
    try:
        import peft
    except ImportError:
        raise InputError("model.lora needs one more package: pip install 'minimal-gpt[lora]'") from None
    peft.inject_adapter_in_model(
        peft.LoraConfig(
            r=config.rank,
            lora_alpha=config.alpha,  # type: ignore[arg-type]  # an int by its annotation alone
            lora_dropout=config.dropout,
            target_modules=list(LAYERS),
        ),
        model,
    )
