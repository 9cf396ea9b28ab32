"""The LightningModule: what a training step and a validation step compute.

Shapes: B batch, T tokens, D emb_dim, V vocab_size.
"""

import math
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from gpt.config import GPTConfig
from gpt.data.module import TokenData
from gpt.data.windows import IGNORE_INDEX
from gpt.errors import InputError, check_least
from gpt.evaluation.scoring import ERROR_BLOCKS, bits_per_byte, target_bytes
from gpt.training import compilation
from gpt.training.guard import Guard
from gpt.training.lora import LoRAConfig, add_adapters
from gpt.training.loss import linear_cross_entropy
from gpt.training.optimizers import OptimizerConfig, build_optimizer
from gpt.training.schedule import learning_rate_factor
from gpt.training.shard import is_sharded, shard
from gpt.weights.load import GPT, start_from


class LanguageModel(LightningModule):
    """A GPT that learns to predict the next token.

    Args:
        config: the model's shape.
        optimizer: the recipe of its updates.
        loss_chunk: tokens whose logits are in memory at the same time, by default 8,192 on a GPU, else 1,024.
        compile: the blocks, or the model as a "whole"; None compiles the blocks where it saves a run time.
        checkpoint_activations: keep only each block's input for the backward pass and compute the rest again:
            a third more time, a fraction of the memory (Chen et al. 2016).
        skip_nonfinite: updates to skip, because their loss or gradient is not finite, before the run stops.
        init_from: weights to start from, in any form that `gpt import` reads, or a run. They decide the
            shape; of `config` only dropout and context_length count, and a shorter context crops positions.
        lora: low-rank adapters, which alone are trained and saved.
    """

    def __init__(
        self,
        config: GPTConfig,
        optimizer: OptimizerConfig = OptimizerConfig(),
        loss_chunk: int | None = None,
        compile: bool | Literal["whole"] | None = None,
        checkpoint_activations: bool = False,
        skip_nonfinite: int = 0,
        init_from: str | None = None,
        lora: LoRAConfig = LoRAConfig(),
    ) -> None:
        super().__init__()
        check_least(1, loss_chunk=loss_chunk)
        self.optimizer_config, self.loss_chunk, self.compile_blocks = optimizer, loss_chunk, compile
        if lora.rank and init_from is None:
            raise InputError("model.lora.rank needs weights to adapt: give --model.init_from")
        self.model = GPT(config) if init_from is None else start_from(init_from, config)
        if lora.rank:
            add_adapters(self.model, lora)
            self.strict_loading = False  # checkpoints of `gpt fit` hold the adapters alone
        self.model.checkpoint_activations = checkpoint_activations
        self.features, self.kernel = None, None  # where `compile_model` compiles them
        self.guard, self.lora = Guard(skip_nonfinite), lora
        self.config = self.model.config
        self.planned_steps = 0  # set when training begins
        self.logs_itself = True  # the `Meter` of `gpt fit` logs at less cost, and turns this off
        self.last_loss = self.last_gradient_norm = torch.tensor(float("nan"))  # stay on the device until read

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids (B, T) -> logits (B, T, V)."""
        return self.model(tokens)

    def cross_entropy(self, batch: tuple[Tensor, ...]) -> Tensor:
        """Mean cross-entropy in nats of a batch: tokens x and targets y, (B, T) each.

        A third tensor, the document of each token, keeps attention within documents.
        """
        x, y = batch[:2]
        documents = batch[2] if len(batch) > 2 else None
        rows = (self.features or self.model.features)(x, document_ids=documents).flatten(0, 1)  # (B * T, D)
        return linear_cross_entropy(rows, self.model.head.weight, y.flatten(), self.loss_chunk, self.kernel)

    def loss(self, batch: tuple[Tensor, ...]) -> Tensor:
        """What training minimises: a subclass may add terms here, which validation does not measure."""
        return self.cross_entropy(batch)

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        """The loss of a batch, weighted so that the sum over an update's batches becomes their mean."""
        loss = self.loss(batch)
        self.last_loss = loss.detach()
        self.guard.add(self.last_loss)
        if self.logs_itself:
            self.log("train_loss", self.last_loss, prog_bar=True, logger=bool(self.trainer.loggers))
        # Lightning divides by `usual`, but `limit_train_batches` can leave fewer at the end of an epoch.
        usual = self.trainer.accumulate_grad_batches
        batches = min(usual, self.trainer.num_training_batches - (batch_idx - batch_idx % usual))
        return loss if batches == usual else loss * (usual / batches)

    def on_validation_epoch_start(self) -> None:
        self._val_sums: list[list[float]] = []  # nats, tokens and bytes of parts of batches

    def validation_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> None:
        batches = self.trainer.num_val_batches[0] * self.trainer.world_size
        parts = min(len(batch[0]), math.ceil(ERROR_BLOCKS / max(1, batches)))  # for the standard error
        lengths = getattr(self.trainer.datamodule, "byte_lengths", None)  # type: ignore[attr-defined]
        for part in zip(*(torch.tensor_split(tensor, parts) for tensor in batch), strict=True):
            tokens, size, loss = int((part[1] != IGNORE_INDEX).sum()), 0, 0.0
            if tokens or is_sharded(self.model):  # all processes take part in a sharded model's forward pass
                loss = float(self.cross_entropy(part))
            if lengths is not None:
                size = int(target_bytes(part[1].cpu(), lengths).sum())
            self._val_sums.append([loss * tokens if tokens else 0.0, tokens, size])  # or padding alone

    def on_validation_epoch_end(self) -> None:
        """Log nats per token, perplexity, and bits per byte, which does not depend on the tokenizer."""
        sums = torch.tensor(self._val_sums, dtype=torch.float64)
        if self.trainer.world_size > 1:  # never on MPS, which has no float64
            every: Any = self.all_gather(sums.to(self.device))  # (processes, parts, 3), which take turns
            sums = every.transpose(0, 1).flatten(0, 1).cpu()
        nats, tokens, sizes = sums.reshape(-1, 3).numpy().T
        loss = float(nats.sum() / max(tokens.sum(), 1))
        metrics = {"val_loss": loss, "val_perplexity": math.exp(min(loss, 700.0))}
        if sizes.any():
            bits, error = bits_per_byte(nats, sizes)
            metrics["val_bits_per_byte"] = bits
            if math.isfinite(error):
                metrics["val_standard_error"] = error
        self.log_dict(metrics, logger=self.logs_itself and bool(self.trainer.loggers))

    def configure_model(self) -> None:
        if self.device_mesh is not None:
            if self.lora.rank:
                raise InputError("fsdp2 does not shard lora's adapters: leave --trainer.strategy fsdp2 out")
            shard(self.model, self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> Any:
        recipe = self.optimizer_config
        # By the precision, which config.yaml keeps, and not by today's speed: a resumed run rounds as before.
        optimizer = build_optimizer(self.model, recipe, str(self.trainer.precision))
        self.planned_steps = self._count_steps()
        shape = recipe.warmup_steps, recipe.schedule, recipe.final_lr_fraction, recipe.decay_fraction
        schedule = LambdaLR(optimizer, lambda step: learning_rate_factor(step, self.planned_steps, *shape))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _count_steps(self) -> int:
        trainer: Any = self.trainer
        if trainer.max_steps > 0:  # always so under gpt fit, see gpt/run/ends.py
            return int(trainer.max_steps)
        if not isinstance(trainer.datamodule, TokenData):  # whose place in the text this would move:
            return int(trainer.estimated_stepping_batches)
        return (trainer.max_epochs or 1) * steps_per_epoch(trainer)

    def on_fit_start(self) -> None:
        """Compile, if asked to or if it saves time, before a resumed run makes up a validation."""
        if self.compile_blocks is None:
            self.compile_blocks = compilation.should_compile(self)
        if self.compile_blocks:
            compilation.compile_model(self)

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: float | None = None, *_: Any, **__: Any
    ) -> None:
        """Clip by the norm of all gradients; where it is not finite, skip the update or stop."""
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)  # of 16-mixed
        if scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
            scaler.unscale_(optimizer)  # Lightning leaves it to a fused optimizer's step, after clipping
        weights = [weight for weight in self.parameters() if weight.grad is not None]
        norm: Any = get_total_norm([w.grad for w in weights])  # type: ignore[misc]
        if hasattr(norm, "full_tensor"):  # each process has a part of the gradients
            norm = norm.full_tensor()
        self.last_gradient_norm = norm  # before clipping
        if not self.guard.passes(self.trainer, norm):
            self.zero_grad()  # no optimizer changes a weight that has no gradient
        elif gradient_clip_val:
            clip_grads_with_norm_(weights, gradient_clip_val, norm)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        part = checkpoint["gpt"] = {"config": self.config.to_dict(), "skipped": self.guard.skipped}
        data: Any = getattr(self.trainer, "datamodule", None)
        if hasattr(data, "prepared"):
            part.update(tokenizer=data.tokenizer.to_dict(), bytes_per_token=data.bytes_per_token)
            part["template"] = data.prepared.meta.get("template")

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.guard.skipped = checkpoint["gpt"].get("skipped", 0)


def steps_per_epoch(trainer: Trainer) -> int:
    """Updates in one pass over the data module's training batches."""
    batches = len(trainer.datamodule.train_dataloader())  # type: ignore[attr-defined]
    limit = trainer.limit_train_batches
    batches = min(batches, limit) if isinstance(limit, int) else int(batches * (limit or 1.0))
    return max(1, -(-batches // trainer.accumulate_grad_batches))
