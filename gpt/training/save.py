"""Checkpoints that are whole or not there, written when they are owed.

runs/NAME/checkpoints/last.ckpt         the newest
                      step-500.ckpt     older ones, as many as are kept
                      best.ckpt         the lowest loss on the held-out text
"""

import os
import sys
import time
from pathlib import Path
from typing import IO, Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from gpt.errors import InputError
from gpt.files import atomic_write
from gpt.training.signals import StopRequest
from gpt.weights.load import read


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the destination and renames; reads tensors and plain values only.

    Lightning's own writes into `$TMPDIR` and moves, which across file systems is a copy: a kill or a full
    disk in the middle of it destroys the old file too.

    Args:
        checked: a checkpoint that was just found to be whole, and need not be checked again.
    """

    def __init__(self, checked: Path | None = None) -> None:
        self.checked = checked

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        """Write `checkpoint` to `path`, atomically.

        Raises:
            OSError: it could not be written; what stood at `path` stands there still.
        """
        with atomic_write(path, "wb") as file:
            try:
                torch.save(checkpoint, EarlyWriter(file))  # type: ignore[arg-type]
            except RuntimeError as error:  # torch's writer hides what the disk said behind its own complaint
                cause: BaseException | None = error
                while cause is not None and not isinstance(cause, OSError):
                    cause = cause.__context__
                raise cause or error from None

    def load_checkpoint(
        self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read it into memory: a mapped file could not be replaced on Windows while it is in use.

        Raises:
            InputError: it is broken, or no checkpoint, or holds code.
        """
        if path != self.checked:
            read(path)
        saved: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        return saved


class EarlyWriter:
    """A file whose bytes go to the disk while more are on their way, and leave memory once they are there.

    Linux starts to write what it is told it may forget, and forgets what it has written: the last flush finds
    little left to do, and the file's pages are used again, where those of a whole checkpoint would first have
    to be found. Elsewhere this is a file like any other.
    """

    def __init__(self, file: IO[bytes], step: int = 1 << 24) -> None:
        self.file, self.step = file, step
        self._written = self._handed_on = 0

    def write(self, data: Any) -> int:
        """Write, and hand on what has gathered."""
        count = self.file.write(data)
        self._written += count
        if self._written - self._handed_on >= self.step and sys.platform == "linux":
            self.file.flush()
            os.posix_fadvise(self.file.fileno(), 0, self._written, os.POSIX_FADV_DONTNEED)
            self._handed_on = self._written
        return count

    def flush(self) -> None:
        """As of any file."""
        self.file.flush()


class Checkpoints(Checkpoint):
    """Keeps `last.ckpt`, the ones before it, and `best.ckpt`.

    A checkpoint is due every `every` steps, before each validation, on a signal, and when training ends. It
    always describes the moment between two steps: a validation that was due then and is not in it is made up
    for by the run that goes on from it.

    Args:
        folder: where they go.
        every: steps between two.
        keep: how many of the newest stay.
        options: the run's options, as YAML.
        stop: asked after each step whether to stop.
    """

    def __init__(self, folder: Path, every: int, keep: int, options: str, stop: StopRequest) -> None:
        if every < 1 or keep < 1:
            raise InputError(
                f"checkpoint_every and keep_checkpoints must be at least 1, got {every} and {keep}"
            )
        self.folder, self.every, self.keep, self.options, self.stop = folder, every, keep, options, stop
        self.best_loss = float("inf")
        self.steps = self.saved_step = 0  # of this process: seen, and in last.ckpt
        self._validated = False
        self._loops: dict[str, Any] = {}  # Lightning's counters between two steps

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Clear away what a killed process left half written, and make up for a validation it did not end."""
        self.steps = self.saved_step = trainer.global_step
        if trainer.is_global_zero:
            for file in [*self.folder.glob(".*.tmp"), *self.folder.parent.glob(".*.tmp")]:
                file.unlink(missing_ok=True)
            if trainer.ckpt_path is not None:
                _set_aside(self.folder / "last.ckpt", Path(trainer.ckpt_path))
        if self._loops and not self._validated and validation_is_due(trainer):
            validation = trainer.fit_loop.epoch_loop.val_loop
            validation.restarting = False  # from its first batch on
            trainer.validating = True
            validation.run()
            trainer.training = True

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save where one is due.

        Raises:
            Stopped: a signal asked for it; the step is saved.
        """
        step = trainer.global_step
        if step == self.steps:  # gradients accumulate, no update yet
            return
        self.steps = step
        signal = self.stop.agreed(trainer)
        last_step = step >= pl_module.planned_steps  # type: ignore[operator]
        if not (signal or last_step or step % self.every == 0 or validation_is_due(trainer)):
            return
        self._loops, self._validated = trainer.fit_loop.state_dict(), False
        if last_step:
            return  # `on_train_end` saves: nothing would make up for a validation after the last step
        self._save_last(trainer)
        if signal:
            self.stop.now(trainer, signal, self.folder / "last.ckpt")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the best."""
        self._validated = True
        loss = float(trainer.callback_metrics["val_loss"])
        if loss < self.best_loss:
            self.best_loss = loss
            self._save(trainer, self.folder / "best.ckpt")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the last steps: a run rarely ends on a multiple of the interval."""
        if trainer.global_step > self.saved_step:
            self._save_last(trainer)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add what Lightning does not: the options, and whether this step is validated."""
        checkpoint["loops"]["fit_loop"] = self._loops
        checkpoint["run"] = {
            "options": self.options,
            "validated": self._validated,
            "saved_at": time.time(),
        }

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Take over what `on_save_checkpoint` added."""
        self._loops, self._validated = checkpoint["loops"]["fit_loop"], checkpoint["run"]["validated"]

    def state_dict(self) -> dict[str, Any]:
        """The loss to beat."""
        return {"best_loss": self.best_loss}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self.best_loss = state_dict["best_loss"]

    def _save_last(self, trainer: Trainer) -> None:
        for logger in trainer.loggers:
            logger.save()  # the checkpoint says how much of metrics.csv there is
        last = self.folder / "last.ckpt"
        if trainer.is_global_zero and last.is_file():
            _keep_under(last, self.folder / f"step-{self.saved_step}.ckpt")
        self._save(trainer, last)
        self.saved_step = trainer.global_step
        if trainer.is_global_zero:
            older = sorted(self.folder.glob("step-*.ckpt"), key=lambda file: file.stat().st_mtime_ns)
            for file in older[: max(0, len(older) - self.keep + 1)]:
                file.unlink(missing_ok=True)

    def _save(self, trainer: Trainer, path: Path) -> None:
        """Save on all processes together, so that all of them stop where the first one's disk is full."""
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        failure: OSError | None = None
        try:
            trainer.strategy.save_checkpoint(checkpoint, path)
        except OSError as error:
            failure = error
        number = trainer.strategy.broadcast(failure.errno or 5 if failure else 0)
        if number:
            raise OSError(number, f"{os.strerror(number)}; the checkpoints before it are whole", str(path))


def validation_is_due(trainer: Trainer) -> bool:
    """Whether Lightning validates after the step that has just ended."""
    fetcher = trainer.fit_loop._data_fetcher
    return fetcher is not None and trainer.fit_loop.epoch_loop._should_check_val_fx(fetcher)


def _set_aside(last: Path, resumed_from: Path) -> None:
    """Make room where a run goes on from another checkpoint than its last."""
    if not last.is_file() or last.resolve() == resumed_from.resolve():
        return
    try:
        os.replace(last, last.with_name(f"step-{read(last)['global_step']}.ckpt"))
    except InputError:
        os.replace(last, last.with_name("last.ckpt.broken"))


def _keep_under(file: Path, name: Path) -> None:
    """Let `file` be found under `name` too, so that there is one under either at any moment."""
    name.unlink(missing_ok=True)
    try:
        os.link(file, name)
    except OSError:  # a file system without links
        os.replace(file, name)
