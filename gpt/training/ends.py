"""How a run ends."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer


class ValidateAtEnd(Callback):
    """Validates the last step too, whatever the interval, so that the best checkpoint can be the last."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Ask Lightning to stop where it stops anyway: it validates before it stops on request."""
        if trainer.global_step >= pl_module.planned_steps:  # type: ignore[operator]
            trainer.should_stop = True
