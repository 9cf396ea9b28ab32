"""What happens between two batches of a run, in its order: `Loop.on_train_batch_end`, from top to bottom.

Lightning computes a batch (`LanguageModel.training_step`), and after the last batch of an update clips
(`configure_gradient_clipping`, where the processes agree on signals and on losses that are not finite), steps
the optimizer and the schedule. Then this callback, the only one of a run, plans and records; Lightning
validates, if it is told to; and at last the callback keeps and saves.
"""

import errno
import hashlib
import json
import os
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import Callback, Trainer

from gpt.data.module import TokenData
from gpt.errors import InputError
from gpt.files import atomic_write, file_sha256
from gpt.run.checkpoint import (
    LOSSES,
    Checkpoints,
    gather,
    load_optimizer,
    random_state,
    set_random_state,
    state_of,
)
from gpt.run.folder import folder_of, opened
from gpt.run.lightning_private import skip_sigterm_broadcast
from gpt.run.limits import Limits
from gpt.run.options import Options
from gpt.run.record import Record
from gpt.run.signals import remembered, told
from gpt.run.snapshots import Snapshots
from gpt.run.start import Start
from gpt.training.module import VALIDATED, LanguageModel, steps_per_epoch
from gpt.training.output import report
from gpt.weights.adapters import without_adapters
from gpt.weights.checkpoint import ModelPart, RunPart, next_session
from gpt.weights.formats.table import Weights
from gpt.weights.load import GPT


class Loop(Callback):
    """A run, from the update that its checkpoint was saved after, or from the first.

    `run` is where it stands: what a checkpoint holds, and the parts of the run count in it.
    """

    def __init__(self, options: Options, module: LanguageModel, data: TokenData, begun: Start) -> None:
        checkpoint = begun.checkpoint
        self.options = options
        self.module = module
        self.data = data
        self.checkpoint = checkpoint
        self.run = (checkpoint.run if checkpoint else None) or RunPart()
        self.limits = Limits(options, self.run, begun.plan, begun.minutes)
        plain = options.trainer
        accumulate = 1 if options.data.tokens_per_update else plain.accumulate_grad_batches
        self.every = -(-plain.val_check_interval // accumulate)
        """Updates between two validations."""
        if not plain.limit_val_batches:
            self.every = sys.maxsize
        module.logs_itself = False
        module.first_step = self.run.step
        module.planned_steps = 1
        self._new, self._existing = folder_of(options.run), begun.folder
        self._model_part: ModelPart
        self._open = ExitStack()  # the folder and the signals

    # -- before the first batch

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        """With the model on its device: open the folder, and restore all but what the first batch needs."""
        run = self.run
        first = trainer.is_global_zero
        broadcast = trainer.strategy.broadcast
        self._first, self._broadcast = first, broadcast
        found = run.step, run.session, run.save
        if found != (theirs := broadcast(found)):
            what = f"process {trainer.global_rank} resumes step, session, save {found}, process 0 {theirs}"
            raise InputError(f"{what}: all processes need to see the same files")
        self.limits.count(steps_per_epoch(self.data) if self.options.trainer.max_epochs > 0 else 0)
        self.module.planned_steps = run.total
        self.folder = self._open_folder()
        self.checkpoints = Checkpoints(self.folder, self.options.keep_checkpoints)
        if first and self.checkpoint:
            self.checkpoints.complete(self.checkpoint)
        self.limits.check_left()

        corpus = corpus_hash(self.data)
        other_text = run.corpus not in ("", corpus)
        run.corpus = corpus
        if other_text:
            report("the text is not the one that this run was trained on: the best checkpoint begins again")
        trained = sum(weight.numel() for weight in self.module.parameters() if weight.requires_grad)
        self.snapshots = Snapshots(self.folder, self.options.snapshot_megabytes, run.step, trained)
        if first:
            self.snapshots.forget_after(run.step)
            self.checkpoints.begin(self.checkpoint, other_text)
        has_best = self.checkpoints.best.is_file()
        run.session, has_best = broadcast((next_session(self.folder) if first else 0, has_best))
        if not has_best:
            run.best_loss = None
        if other_text:
            run.stalled = 0

        run.options = asdict(self.options)
        if first:
            with atomic_write(self.folder / "config.yaml") as file:
                file.write(yaml.safe_dump(run.options, sort_keys=False, allow_unicode=True))
        self._model_part = ModelPart(
            config=self.module.config.to_dict(),
            tokenizer=self.data.tokenizer.to_dict(),
            template=self.data.prepared.meta.template,
            adapters=self._adapters(trainer) if self.module.options.lora.rank else None,
        )
        self.data.place = run.place - run.place % (self.data.batch_size * trainer.world_size)  # whole batches
        if self.checkpoint:
            load_optimizer(self.module, trainer.optimizers[0], self.checkpoint.tensors)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Restore what the first batch depends on."""
        run, plain = self.run, self.options.trainer
        skip_sigterm_broadcast(trainer)
        self._open.enter_context(remembered(self.module.guard))
        self.limits.begin(bool(self.module.compile_blocks), self.every)
        tensors = self.checkpoint.tensors if self.checkpoint else {}
        state = state_of(tensors, trainer.global_rank)
        show = plain.enable_progress_bar
        self.record = Record(self.folder, run, self.options.log_every, show, self._first)
        self._open.callback(self.record.close)
        losses = state.pop(LOSSES, torch.tensor(0.0)).to(self.module.device)
        self.record.begin(self.tokens, losses, plain.logger.split(","))
        self.module.plan(run.total)
        self._tell(trainer, validate=False)
        set_random_state(
            state, self.options.seed_everything, trainer.global_rank, trainer.strategy.root_device
        )
        if run.scale and (scaler := _scaler(trainer)):
            scaler.load_state_dict(run.scale)
        self.checkpoint = None  # its tensors are in use no more

    # -- between two batches

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        """After each batch; most of it after an update."""
        module = self.module
        run = self.run
        limits = self.limits
        self.record.batch(module.last_loss)
        made = trainer.global_step
        if module.first_step + made == run.step:  # gradients accumulate, no update yet
            self._tell(trainer, validate=False)
            return
        run.step, run.place = module.first_step + made, self.data.place + made * self.data.windows_per_update

        # 1. How many updates, and whether this was the last.
        changed = limits.update(self._agreed(self.record.elapsed()))
        module.planned_steps = run.total
        if changed:
            module.plan(run.total)

        # 2. A row of metrics.csv.
        if self.record.is_due():
            mean = torch.as_tensor(self.record.loss_sum, device=module.device) / run.batches
            loss = float(trainer.strategy.reduce(mean, reduce_op="mean"))  # over all processes
            rate, norm = trainer.optimizers[0].param_groups[0]["lr"], float(module.last_gradient_norm)
            self.record.update(self.tokens, loss, rate, norm)

        # 3. A validation; what is kept and saved follows it.
        validates = limits.is_over or run.step % self.every == 0
        validates = validates and self.options.trainer.limit_val_batches > 0
        self._tell(trainer, validates)
        if not validates:
            self._keep(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Note when."""
        self._paused = self.record.elapsed()

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Record the loss, and write a sample."""
        found = trainer.callback_metrics
        figures = {name: float(found[name]) for name in VALIDATED if name in found}
        before = self.run.validation.get("val_loss")
        self.record.validated(self.tokens, figures)
        self.record.sample(self.module.model, self.data)
        elapsed = self.record.elapsed()
        self.record.paused(elapsed - self._paused)
        self.limits.paused(self._agreed(elapsed - self._paused))
        if self.limits.validated(figures["val_loss"], before, elapsed):
            self.module.plan(self.run.total)
        trainer.should_stop |= self.limits.is_over
        self._keep(trainer, validated=True)

    def _keep(self, trainer: Trainer, validated: bool = False) -> None:
        """Keep what an update made, with its validation where one was due: none is ever owed."""
        run = self.run
        guard = self.module.guard
        over = self.limits.is_over

        # 4. A snapshot of the weights.
        if self.snapshots.is_due(run.step, last=over):
            if self._first:
                weights = gather(self.module)
                self.snapshots.save(run.step, float(self.module.last_loss), weights, self._model_part)
            self.snapshots.saved = run.step

        # 5. A checkpoint.
        regular = run.step % self.options.checkpoint_every == 0
        if over or validated or regular or guard.agreed or guard.agreed_save:
            self._save(trainer)
        guard.wants_save = self._first and self.checkpoints.is_late(run)

        # 6. A signal that any process has received.
        if guard.agreed and not over:
            raise told(guard.agreed, run.step, str(self.checkpoints.last), str(self.folder))

    # -- parts

    @property
    def tokens(self) -> int:
        """Trained on, by all processes."""
        return self.run.place * self.data.context_length

    def close(self) -> None:
        """Give back what the run has taken, however it ended."""
        self._open.close()

    def _open_folder(self) -> Path:
        """Reserve and lock the folder, in the first process for all."""
        folder: Path | None = None
        error: Exception | None = None
        if self._first:
            try:
                folder = self._open.enter_context(opened(self._new, self._existing))
            except (InputError, OSError) as reason:
                error = reason
        folder, error = self._broadcast((folder, error))
        if folder is None:
            raise error or InputError("the first process has no folder")
        return folder

    def _adapters(self, trainer: Trainer) -> dict[str, Any]:
        """Of a run with adapters; its fixed weights are written into the folder, once."""
        base, lora = self.folder / "base", self.module.options.lora
        if self._first and (self.checkpoint is None or not base.is_dir()):
            weights = without_adapters(self.module.model.state_dict())
            GPT.from_weights(self.module.config, weights).save_pretrained(base)
        trainer.strategy.barrier()
        sha256 = file_sha256(base / "model.safetensors")
        return {"rank": lora.rank, "scale": lora.alpha / lora.rank, "base": sha256}

    def _agreed(self, seconds: float) -> float:
        """A time; where it decides something, that of the first process."""
        return self._broadcast(seconds) if self.limits.seconds is not None else seconds

    def _tell(self, trainer: Trainer, validate: bool) -> None:
        """Tell Lightning whether it validates after this batch, and whether training ends."""
        # Lightning asks whether this number divides the batches so far.
        trainer.val_check_batch = 1 if validate else sys.maxsize
        trainer.should_stop |= self.limits.is_over and not (validate and self.limits.may_go_on)

    def _save(self, trainer: Trainer) -> None:
        """Save on all processes together, so that all of them stop if the first one's disk is full."""
        tensors, number = self._gathered(trainer), 0
        if self._first:
            try:
                run = replace(self.run, total=min(self.run.total, 1 << 53))  # as far as JSON's numbers go
                self.checkpoints.save(tensors, self._model_part, run)
            except OSError as error:
                number = error.errno or errno.EIO
        if number := self._broadcast(number):
            why = f"{os.strerror(number)}; the earlier checkpoints are intact"
            raise OSError(number, why, str(self.checkpoints.last))

    def _gathered(self, trainer: Trainer) -> Weights:
        """The tensors of a checkpoint, and in `run` all that it holds beside them; for all processes."""
        run, scaler = self.run, _scaler(trainer)
        tensors = gather(self.module, trainer.optimizers[0]) if self._first else {}
        own = random_state(trainer.strategy.root_device)
        own[LOSSES] = torch.as_tensor(self.record.loss_sum).to("cpu")
        states = [own] * trainer.world_size
        if trainer.world_size > 1:
            torch.distributed.all_gather_object(states, own)
        for rank, state in enumerate(states):
            tensors |= {f"random/{rank}/{name}": tensor for name, tensor in state.items()}
        run.scale = scaler.state_dict() if scaler else None
        run.save, run.saved_at = run.save + 1, time.time()
        self.record.note()
        return tensors


def corpus_hash(data: TokenData) -> str:
    """Identifies a text by its tokens, whatever folder it is in."""
    meta = data.prepared.meta
    return hashlib.sha256(json.dumps([meta.tokenizer, meta.splits], sort_keys=True).encode()).hexdigest()


def _scaler(trainer: Trainer) -> Any:
    """The loss scale of float16, if the run has one."""
    return getattr(trainer.precision_plugin, "scaler", None)
