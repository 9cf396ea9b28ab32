"""The gradients of an update, as the optimizer got them."""

from typing import Any

import lightning.pytorch as pl
import torch


class Gradients(pl.Callback):
    """Keeps the gradients (P,) of all parameters after the last batch."""

    last: torch.Tensor

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        self.last = torch.cat([weight.grad.flatten() for weight in module.parameters()])
