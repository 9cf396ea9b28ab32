"""Checkpoints that are intact or absent, saved on schedule."""

import errno
import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import IO, Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint

from gpt.errors import InputError, check_least
from gpt.files import atomic_write
from gpt.run.folder import RunFolder
from gpt.run.lightning_private import dump_checkpoint, validate_now, validation_is_due
from gpt.run.signals import StopRequest
from gpt.training.output import report
from gpt.weights.checkpoint import RunPart, checkpoints_of, next_session, read


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the destination and renames; reads tensors and plain values only.

    Lightning's own writes into `$TMPDIR` and moves, which across file systems is a copy: a kill or a full
    disk during the copy destroys the old file too. `checked` was just found intact and is not checked again.
    """

    def __init__(self, checked: Path | None = None) -> None:
        self.checked = checked

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write it atomically; an OSError leaves the old file at `path` unchanged."""
        with atomic_write(path, "wb") as file:
            try:
                torch.save(checkpoint, EarlyWriter(file))  # type: ignore[arg-type]
            except RuntimeError as error:  # torch's writer hides the disk's error behind its own
                cause: BaseException | None = error
                while cause is not None and not isinstance(cause, OSError):
                    cause = cause.__context__
                raise cause or error from None

    def load_checkpoint(self, path: Any, *_: Any, **__: Any) -> dict[str, Any]:
        """Read it into memory: a mapped file could not be replaced on Windows while it is in use."""
        if Path(path) != self.checked:  # SLURM's, which Lightning finds by itself
            read(path)
        return torch.load(path, map_location="cpu", weights_only=True)


class EarlyWriter:
    """A file that Linux writes to disk every 16 MiB while it grows, so that the final flush is short.

    POSIX_FADV_DONTNEED starts to write dirty pages and frees clean ones: the page cache does not fill up.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.flush, self._pending = file, file.flush, 0

    def write(self, data: Any) -> int:
        """Write as the file does."""
        count = self.file.write(data)
        self._pending += count
        if self._pending >= 1 << 24 and sys.platform == "linux":
            self.flush()
            os.posix_fadvise(self.file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            self._pending = 0
        return count


class Checkpoints(Checkpoint):
    """Keeps the newest checkpoint, `last.ckpt`, those before it, `step-N.ckpt`, and `best.ckpt`.

    It saves every `every` steps, before each validation, on a signal, and when training ends. A checkpoint
    always describes the moment between two steps. If a validation was due then and is not part of it, the run
    that resumes it validates first. The newest `keep` are kept; the best has the lowest validation loss.
    """

    def __init__(self, folder: RunFolder, every: int, keep: int, stop: StopRequest) -> None:
        check_least(1, checkpoint_every=every, keep_checkpoints=keep)
        self.run, self.every, self.keep, self.stop = folder, every, keep, stop
        self.best_loss = float("inf")
        self._step = self._session = self._saves = 0
        self._saved = (0, False)  # the step in last.ckpt, and whether its validation is part of it
        self._validated = self._mid_update = self._other_text = False
        self._loops: dict[str, Any] = {}  # Lightning's counters between two steps

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        self.last, self.best = (self.run / f"checkpoints/{name}.ckpt" for name in ("last", "best"))
        meta = trainer.datamodule.prepared.meta  # type: ignore[attr-defined]
        # The text is identified by its tokens, whatever folder it is in.
        tokens = [meta["tokenizer"], {name: file["sha256"] for name, file in meta["files"].items()}]
        self._corpus = hashlib.sha256(json.dumps(tokens, sort_keys=True).encode()).hexdigest()

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        self._step = trainer.global_step
        self._saved = self._step, self._validated
        if trainer.is_global_zero:
            self._session = next_session(self.run / "")
            for file in (self.run / "").rglob(".*.tmp"):
                file.unlink(missing_ok=True)
            if self.last.resolve() != Path(trainer.ckpt_path or self.last).resolve():
                _set_aside(self.last, "step-")
            # A best.ckpt of a later step is another future's; of another text, it cannot be compared.
            _set_aside(self.best, "best-step-", -1 if self._other_text else self._step)
        if not trainer.strategy.broadcast(self.best.is_file()):
            self.best_loss = float("inf")
        if self._loops and not self._validated and validation_is_due(trainer):
            validate_now(trainer)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        before, self._step = self._step, trainer.global_step
        self._mid_update = self._step == before  # gradients accumulate
        if self._mid_update:
            return
        signal, last_step = pl_module.guard.agreed, self._step >= pl_module.planned_steps
        if not (signal or last_step or self._step % self.every == 0 or validation_is_due(trainer)):
            return
        self._loops, self._validated = trainer.fit_loop.state_dict(), False
        if last_step:
            return  # `on_train_end` saves: no resumed run would repeat a validation after the last step
        self._save_last(trainer)
        if signal:
            self.stop.act(trainer, signal, self.last)

    def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
        """Save the best; never in the middle of an update, which no run could resume exactly."""
        if self._mid_update:
            return
        self._validated = True
        loss = float(trainer.callback_metrics["val_loss"])
        if loss < self.best_loss:
            self.best_loss = loss
            self._save(trainer, self.best)

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        if (trainer.global_step, self._validated) > self._saved:
            self._save_last(trainer)

    def on_save_checkpoint(self, trainer: Trainer, _: Any, checkpoint: dict[str, Any]) -> None:
        self._saves += 1
        checkpoint["loops"]["fit_loop"] = self._loops
        checkpoint["run"] = RunPart(
            options=self.run.config,
            validated=self._validated,
            session=self._session,
            save=self._saves,
            corpus=self._corpus,
            saved_at=time.time(),
        )

    def on_load_checkpoint(self, trainer: Trainer, _: Any, checkpoint: dict[str, Any]) -> None:
        self._loops, self._validated = checkpoint["loops"]["fit_loop"], checkpoint["run"]["validated"]
        if checkpoint["run"].get("corpus", self._corpus) != self._corpus:
            report("the text is not the one that this run was trained on: the best checkpoint begins again")
            self._other_text = True
            if early := trainer.early_stopping_callback:  # its best loss is that of the other text
                checkpoint["callbacks"].pop(early.state_key, None)

    def state_dict(self) -> dict[str, Any]:
        return {"best_loss": self.best_loss}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best_loss = state_dict["best_loss"]

    def _save_last(self, trainer: Trainer) -> None:
        for logger in trainer.loggers:
            logger.save()  # the checkpoint stores the length of metrics.csv
        step = trainer.global_step
        if trainer.is_global_zero and self.last.is_file() and step > self._saved[0]:
            earlier = self.last.with_name(f"step-{self._saved[0]}.ckpt")
            earlier.unlink(missing_ok=True)
            try:  # the file exists under one of its two names at any moment
                os.link(self.last, earlier)
            except OSError:  # a file system without links
                os.replace(self.last, earlier)
        self._save(trainer, self.last)
        self._saved = step, self._validated
        if trainer.is_global_zero:
            newest_first = checkpoints_of(self.run / "", broken_first=False)
            older = [file for file in newest_first if file.name.startswith("step-")]
            for file in older[self.keep - 1 :]:
                file.unlink(missing_ok=True)

    def _save(self, trainer: Trainer, path: Path) -> None:
        """Save on all processes together, so that all of them stop if the first one's disk is full."""
        checkpoint, number = dump_checkpoint(trainer), 0
        try:
            trainer.strategy.save_checkpoint(checkpoint, path)
        except OSError as error:
            number = error.errno or errno.EIO
        if number := trainer.strategy.broadcast(number):
            raise OSError(number, f"{os.strerror(number)}; the earlier checkpoints are intact", str(path))


def _set_aside(file: Path, prefix: str, after: int = -1) -> None:
    """Name a checkpoint by its step, if that is later than `after`, or as broken."""
    if not file.is_file():
        return
    try:
        if (step := read(file)["global_step"]) > after:
            os.replace(file, file.with_name(f"{prefix}{step}.ckpt"))
    except InputError:
        os.replace(file, f"{file}.broken")
