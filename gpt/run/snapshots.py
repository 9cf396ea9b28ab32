"""Snapshots of a run's weights, kept so that one can watch it learn."""

from contextlib import suppress
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

from gpt.errors import check_least
from gpt.run.folder import RunFolder
from gpt.run.lightning_private import dump_checkpoint
from gpt.run.save import AtomicCheckpointIO
from gpt.weights.checkpoint import Snapshot, snapshots_of


class Snapshots(Callback):
    """Keeps the weights in bfloat16 after steps 1 to 8, 10, 12, 14, 16, 20, ..., and after the last.

    All together take at most `megabytes`: the closest ones go first, so that the others stay evenly spread.
    A model of which fewer than eight fit has none. A snapshot is a checkpoint without what resuming needs.
    """

    def __init__(self, folder: RunFolder, megabytes: int) -> None:
        check_least(0, snapshot_megabytes=megabytes)
        self.run, self.most = folder, megabytes * 1_000_000

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._step = self._saved = trainer.global_step
        trained = sum(weight.numel() for weight in pl_module.parameters() if weight.requires_grad)
        self._keeps_any = self.most >= 8 * 2 * trained  # fewer show little, and take a while each
        if trainer.is_global_zero:
            for step, _, file in snapshots_of(self.run / ""):
                if step > self._step:  # of another future
                    file.unlink(missing_ok=True)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        before, self._step = self._step, trainer.global_step
        if self._step != before and self._step % (1 << max(0, self._step.bit_length() - 3)) == 0:
            self._save(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        if self._step != self._saved:
            self._save(trainer, pl_module)

    def _save(self, trainer: Trainer, module: Any) -> None:
        if not self._keeps_any:
            return
        self._saved = step = self._step
        saved = dump_checkpoint(trainer)  # on all processes: each may have a part
        if not trainer.is_global_zero:
            return
        weights = {name: t.to("cpu", torch.bfloat16) for name, t in saved["state_dict"].items()}
        if module.config.tie_embeddings:
            weights.pop("model.head.weight", None)  # it would be written twice
        parts: dict[str, Any] = {name: saved.get(name) for name in ("global_step", "gpt", "adapters")}
        file = self.run / "snapshots" / f"step-{step}-loss-{float(module.last_loss):.4f}.ckpt"
        with suppress(OSError):  # a disk that is full ends the run at its next checkpoint, with a line
            AtomicCheckpointIO().save_checkpoint({**parts, "state_dict": weights}, file)
            thin(snapshots_of(self.run / ""), self.most)
        for logger in trainer.loggers:
            logger.save()  # whoever watches sees the loss so far


def thin(found: list[Snapshot], most: int) -> None:
    """Delete snapshots until they take at most so many bytes, the ones first whose neighbours are closest."""
    while len(found) > 2 and sum(file.stat().st_size for *_, file in found) > most:
        gaps = [after[0] / before[0] for before, after in zip(found, found[2:], strict=False)]
        *_, file = found.pop(1 + gaps.index(min(gaps)))
        file.unlink(missing_ok=True)
