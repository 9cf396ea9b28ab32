"""The LightningModule: the computation of a training step and a validation step.

Shapes: B batch, T tokens, D emb_dim, V vocab_size.
"""

import math
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from gpt.config import GPTConfig
from gpt.data.module import TokenData
from gpt.data.windows import IGNORE_INDEX, Batch, WeightedBatch
from gpt.errors import InputError
from gpt.evaluation.scoring import ERROR_BLOCKS, bits_per_byte
from gpt.plain import JsonObject
from gpt.training import compilation
from gpt.training.guard import Guard
from gpt.training.lora import LoRAConfig, add_adapters
from gpt.training.loss import Kernel, head_cross_entropy, is_matrix
from gpt.training.optimizers import OptimizerConfig, build_optimizer
from gpt.training.options import ModelOptions
from gpt.training.sampled import LATE_ONE_IN, early_steps, sampled_cross_entropy
from gpt.training.schedule import learning_rate_factor
from gpt.weights.load import PretrainedGPT, StoredModel, read_weights, start_from

VALIDATED = ("val_loss", "val_perplexity", "val_bits_per_byte", "val_standard_error")
"""The metrics that a validation logs and metrics.csv records."""

_GROUPS = {"config": GPTConfig, "optimizer": OptimizerConfig, "lora": LoRAConfig}
"""The options of `ModelOptions` that are dataclasses; a Trainer's checkpoint has dictionaries for them."""


class LanguageModel(LightningModule):
    """A GPT that learns to predict the next token.

    Args:
        config: the model's shape.
        optimizer: the optimizer's settings.
        weights: those that `init_from` names, if they were read before.
        options: the other fields of `ModelOptions`.

    A checkpoint of an ordinary Trainer has these arguments, so `load_from_checkpoint` needs none of them.
    """

    def __init__(
        self,
        config: GPTConfig | JsonObject,
        optimizer: OptimizerConfig | JsonObject = OptimizerConfig(),
        weights: StoredModel | None = None,
        **options: Any,  # each has the type of its field
    ) -> None:
        super().__init__()
        given: dict[str, Any] = {"config": config, "optimizer": optimizer, **options}
        for name, value in given.items():
            if isinstance(value, dict):  # from a Trainer's checkpoint
                given[name] = _GROUPS[name](**value)
        plain = ModelOptions(**given)
        self.options = plain
        if weights is None and plain.init_from is not None:
            weights = read_weights(plain.init_from)
        self.model = PretrainedGPT(plain.config) if weights is None else start_from(weights, plain.config)
        if plain.lora.rank:
            add_adapters(self.model, plain.lora.rank)
        self.model.checkpoint_activations = plain.checkpoint_activations
        self.kernel: Kernel | None = None  # the compiled loss, if `compile_model` sets it
        self.guard = Guard()
        self.config = self.model.config
        self.first_step = 0
        """Updates that were made before this training, see `continue_from`."""
        self.total_steps = 0
        """Updates when the schedule ends, including `first_step`; 0 until the Trainer is asked."""
        self.last_loss = torch.tensor(float("nan"))  # stays on the device until it is read
        self.last_term = self.last_loss
        """The last loss times its weight in its update's mean."""
        self.last_gradient_norm = self.last_loss
        self.last_learning_rate = float("nan")
        """The blocks' matrices' learning rate in the last update: that of the optimizer's first group."""
        saved = {**asdict(plain), "config": self.config.to_dict()}
        self.save_hyperparameters(saved if plain.lora.rank else {**saved, "init_from": None})

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute the logits: token ids (B, T) -> (B, T, V)."""
        return self.model(tokens)

    def cross_entropy(self, batch: Batch | WeightedBatch) -> Tensor:
        """Return the mean cross-entropy in nats of a batch: tokens x and targets y, (B, T) each.

        An optional third tensor has each token's document and keeps attention within documents. Raises
        InputError for `sampled_softmax` with a head that is more than a matrix: only a matrix's rows can be
        sampled.
        """
        x, y = batch[:2]
        documents = batch[2] if len(batch) > 2 else None
        rows = self.model.features(x, document_ids=documents).flatten(0, 1)  # (B * T, D)
        head = self.model.head
        targets = y.flatten()
        chunk = self.options.loss_chunk
        # Scoring all is cheap on a GPU, while reading a sample's size would wait for it.
        one_in = self.options.sampled_softmax if self.training and x.device.type == "cpu" else 1
        if one_in > 1:
            if self.step >= early_steps(self.total_steps):
                one_in = LATE_ONE_IN
            if not is_matrix(head):
                raise InputError("model.sampled_softmax needs a head that is a plain matrix: set it to 1")
            return sampled_cross_entropy(rows, head.weight, targets, one_in, chunk, self.kernel)
        return head_cross_entropy(head, rows, targets, chunk, self.kernel)

    def continue_from(self, step: int, total_steps: int) -> None:
        """Begin after `step` updates, with a schedule that ends after `total_steps`, both counted from the
        first training of these weights.

        To be called before the Trainer configures the optimizers, as in a callback's `setup`. Without it
        training begins at step 0, and the Trainer's limits say where the schedule ends.
        """
        self.first_step = step
        self.total_steps = total_steps

    @property
    def step(self) -> int:
        """Updates made so far."""
        return int(self.first_step + self.trainer.global_step)

    def loss(self, batch: Batch | WeightedBatch) -> Tensor:
        """Return the loss to minimise. A subclass may add terms here; validation does not measure them."""
        return self.cross_entropy(batch)

    def training_step(self, batch: Batch | WeightedBatch, batch_idx: int) -> Tensor:
        """Return the loss of a batch; Lightning averages the losses of an update's batches.

        If the batches score different numbers of tokens, a `WeightedBatch` has its weight in this mean.
        """
        loss = self.loss(batch)
        self.last_loss = loss.detach()
        if isinstance(batch, WeightedBatch):
            loss = loss * batch.weight
        self.last_term = loss.detach()
        # With 0 nobody reads the log, which costs time in each step.
        if self.trainer.log_every_n_steps:  # type: ignore[attr-defined]
            self.log("train_loss", self.last_loss, prog_bar=True)
        return loss

    def on_validation_epoch_start(self) -> None:
        tokenizer = getattr(self.trainer.datamodule, "tokenizer", None)  # type: ignore[attr-defined]
        lengths = tokenizer.byte_lengths() if tokenizer else np.zeros(self.config.vocab_size, np.int64)
        self._byte_lengths = torch.from_numpy(lengths).to(self.device)  # (V,), of each token
        self._val_losses: list[Tensor] = []  # mean of each part of a batch, in nats per token
        self._val_counts: list[Tensor] = []  # tokens and bytes of each part, (2,)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Add the losses of a batch, in as many parts as the standard error needs blocks.

        All stays on the device until the last batch.
        """
        batches = self.trainer.num_val_batches[0] * self.trainer.world_size
        parts = min(len(batch[0]), math.ceil(ERROR_BLOCKS / max(1, batches)))
        split = [torch.tensor_split(tensor, parts) for tensor in batch]
        for part in zip(*split, strict=True):
            targets = part[1]
            is_scored = targets != IGNORE_INDEX
            tokens = is_scored.sum()
            loss = self.cross_entropy(part)
            self._val_losses.append(torch.where(tokens > 0, loss, 0.0))  # NaN for a part that is only padding
            size = (self._byte_lengths[targets.clamp(min=0)] * is_scored).sum()
            self._val_counts.append(torch.stack([tokens, size]))

    def on_validation_epoch_end(self) -> None:
        """Log nats per token, perplexity, and bits per byte, which does not depend on the tokenizer."""
        losses = torch.stack(self._val_losses).cpu().double()  # (parts,); MPS has no float64
        counts = torch.stack(self._val_counts).cpu().double()  # (parts, 2)
        sums = torch.cat([(losses * counts[:, 0])[:, None], counts], dim=1)  # nats, tokens and bytes
        if self.trainer.world_size > 1:  # never on MPS
            gathered = self.all_gather(sums.to(self.device))  # (processes, parts, 3), interleaved
            assert isinstance(gathered, Tensor)
            sums = gathered.transpose(0, 1).flatten(0, 1).cpu()
        nats, tokens, sizes = sums.numpy().T
        loss = float(nats.sum() / max(tokens.sum(), 1))
        metrics = {"val_loss": loss, "val_perplexity": math.exp(min(loss, 700.0))}
        if sizes.any():
            bits, error = bits_per_byte(nats, sizes)
            metrics["val_bits_per_byte"] = bits
            if math.isfinite(error):
                metrics["val_standard_error"] = error
        self.log_dict(metrics)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        # Muon's number type is the run's precision, which its options keep: so a resumed run rounds the same.
        optimizer = build_optimizer(self.model, self.options.optimizer, str(self.trainer.precision))
        self.total_steps = self.total_steps or self._count_steps()
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": LambdaLR(optimizer, self._rate_factor), "interval": "step"},
        }

    def _rate_factor(self, step: int) -> float:
        """Return the factor of the peak learning rates after `step` updates of this training."""
        recipe = self.options.optimizer
        return learning_rate_factor(
            self.first_step + step,
            self.total_steps,
            recipe.warmup_steps,
            recipe.schedule,
            recipe.final_lr_fraction,
        )

    def _count_steps(self) -> int:
        trainer = self.trainer
        if trainer.max_steps > 0:
            return trainer.max_steps
        data = trainer.datamodule  # type: ignore[attr-defined]
        if isinstance(data, TokenData):  # Lightning's own count would move the data's place in the text
            accumulated = trainer.accumulate_grad_batches
            batches = data.updates_per_epoch * accumulated
            limit = trainer.limit_train_batches  # a number of batches, or as a float a share of the epoch
            batches = int(limit * batches) if isinstance(limit, float) else min(limit, batches)
            return max(1, trainer.max_epochs or 1) * max(1, math.ceil(batches / accumulated))
        return int(trainer.estimated_stepping_batches)

    def set_total_steps(self, steps: int) -> None:
        """Make the schedule end after another number of updates; the next update already uses it.

        A limit of time needs this: the speed shows only while training how many updates it allows.
        """
        if steps == self.total_steps:
            return
        self.total_steps = steps
        schedule = self.lr_schedulers()
        assert isinstance(schedule, LambdaLR)
        updates = schedule.last_epoch  # of this training; LambdaLR calls them epochs
        for group in schedule.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * self._rate_factor(updates)

    def on_fit_start(self) -> None:
        """Compile the model if the options ask for it."""
        if self.options.compile:
            compilation.compile_model(self)

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip by the norm of all gradients; stop the run if it is not finite.

        No other hook stands between this norm and the optimizer's step, so the guard is called here.
        """
        if gradient_clip_algorithm not in (None, "norm"):
            raise InputError(
                f"gradient_clip_algorithm {gradient_clip_algorithm}: gradients are clipped by norm"
            )
        weights = [weight for weight in self.parameters() if weight.grad is not None]
        norm = get_total_norm([weight.grad for weight in weights])  # type: ignore[misc]
        self.last_gradient_norm = norm  # before clipping
        self.last_learning_rate = float(optimizer.param_groups[0]["lr"])
        self.guard.check(self.trainer, self.last_loss, norm, self.step + 1)
        if gradient_clip_val:
            clip_grads_with_norm_(weights, gradient_clip_val, norm)
