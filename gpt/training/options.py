"""The options of a model and its training. Nothing here imports Lightning, so `gpt fit --help` is fast."""

from dataclasses import dataclass

from gpt.config import GPTConfig
from gpt.errors import InputError, check_least
from gpt.training.lora import LoRAConfig
from gpt.training.optimizers import OptimizerConfig


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """A model and how it is trained; InputError for a value out of its range."""

    config: GPTConfig = GPTConfig()
    """The model's shape."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer's settings."""
    lora: LoRAConfig = LoRAConfig()
    """Low-rank adapters: only they are trained and saved."""
    init_from: str | None = None
    """Weights to start from: gpt2, a run, or what `gpt import` reads. A run's logits are divided by its
    temperature. The weights decide the model's shape: of its options only dropout and context_length can be
    changed. A shorter context crops the table of positions, a longer one stretches it.
    Elsewhere: model_name_or_path."""
    compile: bool = False
    """Compile the blocks, which takes 15 to 100 seconds; on a GPU, and on a CPU in bfloat16, steps are then
    faster."""
    checkpoint_activations: bool = False
    """Keep only each block's input for the backward pass and recompute the rest: a third more time, a
    fraction of the memory (Chen et al. 2016). Rare. Elsewhere: gradient_checkpointing."""
    loss_chunk: int | None = None
    """Tokens whose logits are in memory at the same time; by default 8,192 on a GPU, else 1,024. Rare."""
    sampled_softmax: int = 1
    """N of the sampled softmax on a CPU: score a batch's targets and a random 1/N of the other tokens. In the
    last fifth of the updates N is 2. A small model with a large vocabulary then learns as much per step, in
    less time. A GPU scores all tokens, which is fast there; sampling would make it wait. Rare."""

    def __post_init__(self) -> None:
        check_least(1, loss_chunk=self.loss_chunk, sampled_softmax=self.sampled_softmax)
        if self.lora.rank and self.init_from is None:
            raise InputError("model.lora.rank needs weights to adapt: give --model.init_from")
