"""Checkpoints that are whole or not there, written when they are owed."""

from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from gpt.files import atomic_write


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the destination and renames.

    Lightning's own writes into `$TMPDIR` and moves, which across file systems is a copy: a kill or a full
    disk in the middle of it destroys the old file too.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        """Write `checkpoint` to `path`, atomically."""
        with atomic_write(path, "wb") as file:
            torch.save(checkpoint, file)


def best_checkpoint(folder: Path) -> ModelCheckpoint:
    """Keeps `best.ckpt`: the lowest bits per byte on the held-out text."""
    return ModelCheckpoint(
        dirpath=folder,
        filename="best",
        monitor="val_bits_per_byte",
        mode="min",
        save_top_k=1,
        enable_version_counter=False,
    )


class LastCheckpoint(ModelCheckpoint):
    """Keeps `last.ckpt`: every `every_n_train_steps` steps, and once more when training ends."""

    def __init__(self, folder: Path, every_n_train_steps: int) -> None:
        super().__init__(
            dirpath=folder,
            filename="last",
            every_n_train_steps=every_n_train_steps,
            enable_version_counter=False,
        )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the last steps: a run rarely ends on a multiple of the interval."""
        if self._last_global_step_saved != trainer.global_step:
            self._save_checkpoint(trainer, str(Path(str(self.dirpath)) / "last.ckpt"))
