"""What happens between two batches of a run, in its order: `Loop.on_train_batch_end`, from top to bottom.

Lightning computes a batch (`LanguageModel.training_step`), and after the last batch of an update clips
(`configure_gradient_clipping`, where the processes agree on signals and on losses that are not finite), steps
the optimizer and the schedule. Then this callback, the only one of a run, plans, records, keeps and saves; at
last Lightning validates, if it is told to.
"""

import errno
import hashlib
import json
import os
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

from gpt.data.module import TokenData
from gpt.errors import InputError
from gpt.files import file_sha256
from gpt.run.checkpoint import Checkpoints, gather, load_optimizer, load_random_state, random_state, save
from gpt.run.folder import RunFolder
from gpt.run.lightning_private import skip_sigterm_broadcast
from gpt.run.limits import Limits
from gpt.run.micro_batch import fit_micro_batch
from gpt.run.options import Options, to_dict
from gpt.run.record import Record, finite
from gpt.run.signals import remembered, told
from gpt.run.snapshots import Snapshots
from gpt.training.module import VALIDATED, LanguageModel, steps_per_epoch
from gpt.training.output import report
from gpt.training.shard import is_sharded
from gpt.weights.adapters import without_adapters
from gpt.weights.checkpoint import Checkpoint, ModelPart, RunPart
from gpt.weights.formats.table import Weights
from gpt.weights.load import GPT


class Loop(Callback):
    """A run, from the update that its checkpoint was saved after, or from the first."""

    def __init__(
        self,
        options: Options,
        module: LanguageModel,
        data: TokenData,
        folder: RunFolder,
        limits: Limits,
        checkpoint: Checkpoint | None,
        total: int | None,
    ) -> None:
        self.options, self.module, self.data = options, module, data
        self.folder, self.limits = folder, limits
        self.checkpoint, self.resumed = checkpoint, checkpoint.run if checkpoint else None
        self.total = total
        """Of the checkpoint, where the options limit the run as they did."""
        plain = options.trainer
        accumulate = 1 if options.data.tokens_per_update else plain.accumulate_grad_batches
        self.every = -(-plain.val_check_interval // accumulate)
        """Updates between two validations."""
        if plain.val_check_interval % accumulate:
            whole = self.every * accumulate
            report(f"validation every {whole} batches, not {plain.val_check_interval}: after whole updates")
        self.step = self.first_step = self.resumed.step if self.resumed else 0
        self.validated = self.resumed.validated if self.resumed else False
        self.record = Record(folder, options.log_every, plain.enable_progress_bar)
        self.snapshots = Snapshots(folder, options.snapshot_megabytes)
        self.checkpoints = Checkpoints(folder, options.keep_checkpoints)
        self._adapters: dict[str, Any] | None = None
        self._corpus = ""
        self._paused = 0.0
        self._signals = ExitStack()

    # -- before the first batch

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Once the processes have met: check that they start alike, open the folder, and begin to count."""
        if self._corpus:  # a validation came first
            return
        self._first, self._broadcast = trainer.is_global_zero, trainer.strategy.broadcast
        found = (self.resumed.step, self.resumed.session, self.resumed.save) if self.resumed else None
        if found != (first := self._broadcast(found)):
            what = f"process {trainer.global_rank} resumes step, session, save {found}, process 0 {first}"
            raise InputError(f"{what}: all processes need to see the same files")
        self.data.setup("fit")  # divides an update into batches, also before a validation that comes first
        epoch = steps_per_epoch(self.data) if self.options.trainer.max_epochs > 0 else 0
        self.limits.count(self.step, epoch, self.total)
        self.folder.open(to_dict(self.options), self._first, self._broadcast)
        self.record.open(self.options.trainer.logger.split(","), self._first, self.step)
        self._corpus = corpus_hash(self.data)
        module = self.module
        module.logs_itself, module.first_step, module.planned_steps = False, self.step, self.limits.total
        other_text = self.resumed is not None and self.resumed.corpus != self._corpus
        if self.resumed:
            self._restore(self.resumed, trainer, other_text)
        if module.options.lora.rank:
            self._keep_base(trainer)
        self.limits.tell()
        self.record.begin(self.step, self.limits.total)
        if self._first:
            trained = sum(weight.numel() for weight in module.parameters() if weight.requires_grad)
            self.snapshots.begin(self.step, trained)
            self.checkpoints.begin(self.step, self.checkpoint, other_text)
        known = self.checkpoints.session, self.checkpoints.best_loss, self.snapshots.keeps_any
        known = self._broadcast(known)
        self.checkpoints.session, self.checkpoints.best_loss, self.snapshots.keeps_any = known
        self.checkpoints.has_saved(self.step, self.validated)

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        """With model and optimizer on their device: find the micro-batch, and restore the optimizer."""
        if self.data.options.tokens_per_update is not None:
            fit_micro_batch(trainer, self.module)
            data = replace(self.options.data, batch_size=self.data.batch_size)
            self.options = replace(self.options, data=data)
            if self._first:
                self.folder.write_config(to_dict(self.options))
        place = self.resumed.place if self.resumed else 0
        self.data.place = place - place % (self.data.batch_size * trainer.world_size)  # whole batches
        if self.checkpoint:
            load_optimizer(self.module, trainer.optimizers[0], self.checkpoint.tensors)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Restore what the first batch depends on."""
        skip_sigterm_broadcast(trainer)
        self._signals.enter_context(remembered(self.module.guard))
        every = self.every if self.options.trainer.limit_val_batches else sys.maxsize
        self.limits.begin(self.step, self.record.elapsed(), bool(self.module.compile_blocks), every)
        self.module.plan(self.limits.total)
        self._tell(trainer, validate=False)
        tensors = self.checkpoint.tensors if self.checkpoint else {}
        device = trainer.strategy.root_device
        load_random_state(tensors, self.options.seed_everything, trainer.global_rank, device)
        if self.resumed and self.resumed.scale and (scaler := _scaler(trainer)):
            scaler.load_state_dict(self.resumed.scale)
        self.checkpoint = None  # its tensors are in use no more

    # -- between two batches

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        """After each batch; most of it after an update."""
        module = self.module
        self.record.batch(module.last_loss, batch[0].numel() * trainer.world_size)
        if self.first_step + trainer.global_step == self.step:  # gradients accumulate, no update yet
            self._tell(trainer, validate=False)
            return
        self.step, self.validated = self.first_step + trainer.global_step, False

        # 1. How many updates, and whether this was the last, after which Lightning validates.
        new_total = self.limits.update(self.step, self._agreed(self.record.elapsed()))
        module.planned_steps = self.limits.total
        if new_total is not None:
            module.plan(new_total)
        over = self.limits.is_over(self.step)
        validates = self.step % self.every == 0 and self.options.trainer.limit_val_batches > 0
        self._tell(trainer, validates)

        # 2. A row of metrics.csv.
        if self.record.is_due(self.step, self.limits.total):
            mean = torch.as_tensor(self.record.loss_sum, device=module.device) / self.record.interval_batches
            loss = float(trainer.strategy.reduce(mean, reduce_op="mean"))  # over all processes
            rate, norm = trainer.optimizers[0].param_groups[0]["lr"], float(module.last_gradient_norm)
            self.record.update(self.step, self.limits.total, loss, rate, norm)

        # 3. A snapshot of the weights.
        self._keep(last=False)

        # 4. A checkpoint; that of the last update follows its validation, which no resumed run would repeat.
        guard, regular = module.guard, self.step % self.options.checkpoint_every == 0
        if not over and (guard.agreed or guard.agreed_save or regular or validates):
            self._save_last(trainer)
        guard.wants_save = self._first and self.checkpoints.is_late(self.step, self.limits.total)

        # 5. A signal that any process has received.
        if guard.agreed and not over:
            raise told(guard.agreed, self.step, str(self.checkpoints.last), str(self.folder / ""))

    # -- validation

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        """One that comes before training begins has the model as training has it."""
        if trainer.state.fn == "validate":
            self.module.compile_once()
        self._paused = self.record.elapsed()

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Record the loss, write a sample, and save the best."""
        found = trainer.callback_metrics
        figures = {name: float(found[name]) for name in VALIDATED if name in found}
        self.record.validated(self.step, figures)
        if not is_sharded(self.module.model):  # the first process would have only a part of the weights
            self.record.sample(self.step, self.module.model, self.data)
        loss = figures["val_loss"]
        self.limits.validated(self.step, loss)
        trainer.should_stop |= self.limits.stopped_early
        self.validated = True
        if loss < self.checkpoints.best_loss:
            self.checkpoints.best_loss = loss
            self._save(trainer, self.checkpoints.best)
        seconds = self.record.elapsed() - self._paused
        self.record.paused(seconds)
        self.limits.paused(self._agreed(seconds))

    # -- the end

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Keep and save what the last update made."""
        self._keep(last=True)
        if (self.step, self.validated) > self.checkpoints.saved:
            self._save_last(trainer)
        self.record.close()

    def owes_validation(self) -> bool:
        """Whether the checkpoint was saved just before a validation, which a kill has prevented."""
        if self.resumed is None or self.resumed.validated or not self.options.trainer.limit_val_batches:
            return False
        return self.step % self.every == 0

    def close(self) -> None:
        """Give back what the run has taken, however it ended."""
        self._signals.close()
        self.record.abandon()
        self.folder.release()

    # -- parts

    def _restore(self, run: RunPart, trainer: Trainer, other_text: bool) -> None:
        """Continue the counts of the checkpoint."""
        self.record.restore(run, trainer.global_rank, trainer.world_size)
        self.module.guard.skipped = run.skipped
        if other_text:
            report("the text is not the one that this run was trained on: the best checkpoint begins again")
        elif run.best_loss is not None:
            self.checkpoints.best_loss = run.best_loss
        self.limits.restore(run, same_text=not other_text)

    def _keep_base(self, trainer: Trainer) -> None:
        """Write the fixed weights of a run with adapters into its folder, once."""
        base = self.folder / "base"
        if self._first and (self.resumed is None or not base.is_dir()):
            weights = without_adapters(self.module.model.state_dict())
            GPT.from_weights(self.module.config, weights).save_pretrained(base)
        trainer.strategy.barrier()
        lora, sha256 = self.module.options.lora, file_sha256(base / "model.safetensors")
        self._adapters = {"rank": lora.rank, "scale": lora.alpha / lora.rank, "base": sha256}

    def _agreed(self, seconds: float) -> float:
        """A time; where it decides something, that of the first process."""
        return self._broadcast(seconds) if self.limits.seconds is not None else seconds

    def _tell(self, trainer: Trainer, validate: bool) -> None:
        """Tell Lightning whether it validates after this batch, and whether training ends."""
        # Lightning asks whether this number divides the batches so far.
        trainer.val_check_batch = 1 if validate else sys.maxsize
        trainer.should_stop |= self.limits.is_over(self.step)

    def _keep(self, last: bool) -> None:
        if not self.snapshots.is_due(self.step, last):
            return
        weights = gather(self.module, None, self._first)
        if self._first:
            self.snapshots.save(self.step, float(self.module.last_loss), weights, self._model_part())
            self.record.save()  # whoever watches sees the loss so far
        self.snapshots.saved = self.step

    def _save_last(self, trainer: Trainer) -> None:
        self.record.save()  # the checkpoint stores the length of metrics.csv
        if self._first:
            self.checkpoints.set_back(self.step)
        self._save(trainer, self.checkpoints.last)
        if self._first:
            self.checkpoints.forget_old()
        self.checkpoints.has_saved(self.step, self.validated)

    def _save(self, trainer: Trainer, path: Path) -> None:
        """Save on all processes together, so that all of them stop if the first one's disk is full."""
        tensors, run = self._contents(trainer)
        number = 0
        if self._first:
            try:
                save(path, tensors, self._model_part(), run)
            except OSError as error:
                number = error.errno or errno.EIO
        if number := self._broadcast(number):
            raise OSError(number, f"{os.strerror(number)}; the earlier checkpoints are intact", str(path))

    def _contents(self, trainer: Trainer) -> tuple[Weights, RunPart]:
        """What a checkpoint holds now; called on all processes."""
        self.checkpoints.saves += 1
        if self.checkpoint and self.resumed:  # before the first batch: what it held
            tensors, loss_sums, place = self.checkpoint.tensors, self.resumed.loss_sums, self.resumed.place
        else:
            tensors = gather(self.module, trainer.optimizers[0], self._first)
            own = random_state(trainer.strategy.root_device), finite(float(self.record.loss_sum))
            states: list[Any] = [own] * trainer.world_size
            if trainer.world_size > 1:
                torch.distributed.all_gather_object(states, own)
            for rank, (random, _) in enumerate(states):
                tensors |= {f"random/{rank}/{name}": state for name, state in random.items()}
            loss_sums = [loss_sum for _, loss_sum in states]
            place = self.data.place + (self.step - self.first_step) * self.data.windows_per_update
        scaler = _scaler(trainer)
        run = RunPart(
            options=to_dict(self.options),
            step=self.step,
            total=min(self.limits.total, 1 << 53),
            place=place,
            validated=self.validated,
            session=self.checkpoints.session,
            save=self.checkpoints.saves,
            saved_at=time.time(),
            corpus=self._corpus,
            skipped=self.module.guard.skipped,
            scale=scaler.state_dict() if scaler else None,
            loss_sums=loss_sums,
            best_loss=finite(self.checkpoints.best_loss),
            **self.limits.known(),
            **self.record.counts(),
        )
        return tensors, run

    def _model_part(self) -> ModelPart:
        return ModelPart(
            config=self.module.config.to_dict(),
            tokenizer=self.data.tokenizer.to_dict(),
            bytes_per_token=self.data.bytes_per_token,
            template=self.data.prepared.meta.template,
            adapters=self._adapters,
        )


def corpus_hash(data: TokenData) -> str:
    """Identifies a text by its tokens, whatever folder it is in."""
    meta = data.prepared.meta
    return hashlib.sha256(json.dumps([meta.tokenizer, meta.sha256], sort_keys=True).encode()).hexdigest()


def _scaler(trainer: Trainer) -> Any:
    """The loss scale of float16, if the run has one."""
    return getattr(trainer.precision_plugin, "scaler", None)
