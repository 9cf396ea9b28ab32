"""What happens between two batches of a run, in its order: `Loop.on_train_batch_end`, from top to bottom.

Lightning computes a batch (`LanguageModel.training_step`), and after the last batch of an update clips
(`configure_gradient_clipping`, where the processes agree on signals and on losses that are not finite), steps
the optimizer and the schedule. Then this callback, the only one of a run, plans, records, keeps and saves; at
last Lightning validates, if it is told to.
"""

import hashlib
import json
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
from gpt.plain import as_dict, build
from gpt.run.checkpoint import (
    Checkpoints,
    gather,
    load_optimizer,
    load_random_state,
    random_state,
    save,
    together,
)
from gpt.run.folder import RunFolder
from gpt.run.lightning_private import skip_sigterm_broadcast
from gpt.run.limits import Known, Limits
from gpt.run.micro_batch import fit_micro_batch
from gpt.run.options import Options, to_dict
from gpt.run.record import VALIDATED, Counts, Record, finite
from gpt.run.signals import Stopped, remembered, told
from gpt.run.snapshots import Snapshots
from gpt.training.module import LanguageModel, steps_per_epoch
from gpt.training.output import report
from gpt.training.shard import is_sharded
from gpt.weights.adapters import AdapterPart, without_adapters
from gpt.weights.checkpoint import Checkpoint, ModelPart, RunPart
from gpt.weights.load import GPT


class Loop(Callback):
    """A run, from the update that its checkpoint was saved after, or from the first."""

    def __init__(
        self,
        options: Options,
        folder: RunFolder,
        limits: Limits,
        checkpoint: Checkpoint | None,
        same_limits: bool,
    ) -> None:
        self.options, self.folder, self.limits, self.checkpoint = options, folder, limits, checkpoint
        self.same_limits = same_limits
        self.resumed = checkpoint.run if checkpoint else None
        plain = options.trainer
        accumulate = 1 if options.data.tokens_per_update else plain.accumulate_grad_batches
        self.every = -(-plain.val_check_interval // accumulate)
        """Updates between two validations."""
        if plain.val_check_interval % accumulate:
            whole = self.every * accumulate
            report(f"validation every {whole} batches, not {plain.val_check_interval}: after whole updates")
        self.step = self.first_step = self.resumed.step if self.resumed else 0
        self.record = Record(folder, options.log_every, options.trainer.enable_progress_bar)
        self.snapshots = Snapshots(folder, options.snapshot_megabytes)
        self.checkpoints = Checkpoints(folder, options.checkpoint_every, options.keep_checkpoints)
        self.validated = self.resumed.validated if self.resumed else False
        self._adapters: dict[str, Any] | None = None
        self._open = self._counting = False
        self._other_text = False
        self._paused = 0.0
        self._signals = ExitStack()

    # -- before the first batch

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Once the processes have met: check that they start alike, and open the folder."""
        if self._open:
            return
        self._open = True
        data, module = _parts(trainer)
        self._check_alike(trainer)
        data.setup("fit")  # divides an update into batches, also before a validation that comes first
        epoch = steps_per_epoch(data) if self.options.trainer.max_epochs > 0 else 0
        self.limits.count(epoch, self.resumed.total if self.resumed and self.same_limits else None)
        if self.step >= self.limits.total:
            done = f"all {self.step} steps are done ({self.limits.reason})"
            raise Stopped(f"{done}: ask for more with --trainer.max_steps", 0)
        self.folder.open(to_dict(self.options), trainer.is_global_zero, trainer.strategy.broadcast)
        self.record.open(self.options.trainer.logger.split(","), trainer.is_global_zero, self.step)
        self._corpus = corpus_hash(data)
        module.logs_itself, module.first_step, module.planned_steps = False, self.step, self.limits.total
        if self.resumed:
            self._restore(self.resumed, trainer, module)
        if module.options.lora.rank:
            self._keep_base(trainer, module)

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        """With model and optimizer on their device: find the micro-batch, and restore the optimizer."""
        data, module = _parts(trainer)
        if data.options.tokens_per_update is not None:
            fit_micro_batch(trainer, module)
            self.options = replace(self.options, data=replace(self.options.data, batch_size=data.batch_size))
            if trainer.is_global_zero:
                self.folder.write_config(to_dict(self.options))
        data.place = self.resumed.place if self.resumed else 0
        data.place -= data.place % (data.batch_size * trainer.world_size)  # whole batches
        if self.checkpoint:
            load_optimizer(module, trainer.optimizers[0], self.checkpoint.tensors)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Restore what the first batch depends on, and begin to count."""
        module = _parts(trainer)[1]
        skip_sigterm_broadcast(trainer)
        self._signals.enter_context(remembered(module.guard))
        self._begin_to_count()
        trained = sum(weight.numel() for weight in module.parameters() if weight.requires_grad)
        self.snapshots.begin(self.step, trained, trainer.is_global_zero)
        self._begin_to_save(trainer)
        warms_up = bool(module.compile_blocks)
        every = self.every if self.options.trainer.limit_val_batches else sys.maxsize
        self.limits.begin(self.step, self.record.elapsed(), warms_up, every)
        module.plan(self.limits.total)
        self._tell(trainer, validate=False)
        tensors = self.checkpoint.tensors if self.checkpoint else {}
        load_random_state(
            tensors, self.options.seed_everything, trainer.global_rank, trainer.strategy.root_device
        )
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None and self.resumed and self.resumed.scale:
            scaler.load_state_dict(self.resumed.scale)
        self.checkpoint = None  # its tensors are in use no more

    # -- between two batches

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        """After each batch; most of it after an update."""
        module = _parts(trainer)[1]
        self.record.batch(module.last_loss, batch[0].numel() * trainer.world_size)
        if self.first_step + trainer.global_step == self.step:  # gradients accumulate, no update yet
            self._tell(trainer, validate=False)
            return
        self.step, self.validated = self.first_step + trainer.global_step, False

        # 1. How many updates, and whether this was the last, after which Lightning validates.
        new_total = self.limits.update(self.step, self._elapsed(trainer))
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
        self._keep(trainer, module, last=False)

        # 4. A checkpoint; that of the last update follows its validation, which no resumed run would repeat.
        guard, regular = module.guard, self.step % self.options.checkpoint_every == 0
        if not over and (guard.agreed or guard.agreed_save or regular or validates):
            self._save_last(trainer)
        guard.wants_save = trainer.is_global_zero and self.checkpoints.is_late(self.step, self.limits.total)

        # 5. A signal that any process has received.
        if guard.agreed and not over:
            raise told(guard.agreed, self.step, str(self.checkpoints.last), str(self.folder / ""))

    # -- validation

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Of one that comes before training begins: with the model as training has it."""
        _, module = _parts(trainer)
        if trainer.state.fn == "validate":
            module.compile_once()
            self._begin_to_count()
            self._begin_to_save(trainer)
        self._paused = self.record.elapsed()

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Record the loss, write a sample, and save the best."""
        data, module = _parts(trainer)
        found = trainer.callback_metrics
        figures = {name: float(found[name]) for name in VALIDATED if name in found}
        self.record.validated(self.step, figures)
        if not is_sharded(module.model):  # the first process would have only a part of the weights
            self.record.sample(self.step, module.model, data)
        self.limits.validated(self.step, figures["val_loss"])
        trainer.should_stop |= self.limits.stopped_early
        self.validated = True
        if figures["val_loss"] < self.checkpoints.best_loss:
            self.checkpoints.best_loss = figures["val_loss"]
            tensors, model, run = self._contents(trainer)
            path = self.checkpoints.best
            self._together(trainer, path, lambda: save(path, tensors, model, run))
        seconds = self.record.elapsed() - self._paused
        self.record.paused(seconds)
        self.limits.paused(
            trainer.strategy.broadcast(seconds) if self.limits.seconds is not None else seconds
        )

    # -- the end

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Keep and save what the last update made."""
        self._keep(trainer, _parts(trainer)[1], last=True)
        if (self.step, self.validated) > self.checkpoints.saved:
            self._save_last(trainer)
        self.record.close("success")

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

    def _check_alike(self, trainer: Trainer) -> None:
        """Each process has looked for a checkpoint by itself."""
        found = (self.resumed.step, self.resumed.session, self.resumed.save) if self.resumed else None
        first = trainer.strategy.broadcast(found)
        if found != first:
            raise InputError(
                f"process {trainer.global_rank} resumes {_named(found)}, process 0 {_named(first)}: "
                "all processes need to see the same files"
            )

    def _restore(self, run: RunPart, trainer: Trainer, module: LanguageModel) -> None:
        """Continue the counts of the checkpoint."""
        counts, known = build(Counts, run.record), build(Known, run.limits)
        self.record.restore(counts, run.loss_sums, trainer.global_rank, trainer.world_size)
        module.guard.skipped = run.skipped
        self._other_text = run.corpus != self._corpus
        if self._other_text:
            report("the text is not the one that this run was trained on: the best checkpoint begins again")
        elif run.best_loss is not None:
            self.checkpoints.best_loss = run.best_loss
        self.limits.restore(known, same_text=not self._other_text)

    def _keep_base(self, trainer: Trainer, module: LanguageModel) -> None:
        """Write the fixed weights of a run with adapters into its folder, once."""
        base = self.folder / "base"
        if trainer.is_global_zero and (self.resumed is None or not base.is_dir()):
            weights = without_adapters(module.model.state_dict())
            GPT.from_weights(module.config, weights).save_pretrained(base)
        trainer.strategy.barrier()
        lora, sha256 = module.options.lora, file_sha256(base / "model.safetensors")
        self._adapters = as_dict(AdapterPart(rank=lora.rank, scale=lora.alpha / lora.rank, base=sha256))

    def _begin_to_count(self) -> None:
        if not self._counting:
            self._counting = True
            self.record.begin(self.step, self.limits.total)

    def _begin_to_save(self, trainer: Trainer) -> None:
        checkpoints = self.checkpoints
        if checkpoints.session:
            return
        checkpoints.has_saved(self.step, self.validated)
        if trainer.is_global_zero:
            resumed = self.checkpoint.path if self.checkpoint else None
            checkpoints.begin(self.step, self.validated, resumed, self._other_text)
        checkpoints.session, there = trainer.strategy.broadcast(
            (checkpoints.session, checkpoints.best.is_file())
        )
        if not there:
            checkpoints.best_loss = float("inf")

    def _elapsed(self, trainer: Trainer) -> float:
        """Seconds of training; where they decide something, those of the first process."""
        seconds = self.record.elapsed()
        return trainer.strategy.broadcast(seconds) if self.limits.seconds is not None else seconds

    def _tell(self, trainer: Trainer, validate: bool) -> None:
        """Tell Lightning whether it validates after this batch, and whether training ends."""
        trainer.val_check_batch = (
            1 if validate else sys.maxsize
        )  # it asks whether this divides the batches so far
        trainer.should_stop |= self.limits.is_over(self.step)

    def _keep(self, trainer: Trainer, module: LanguageModel, last: bool) -> None:
        if not self.snapshots.is_due(self.step, last):
            return
        weights = gather(module, None, trainer.is_global_zero)
        if trainer.is_global_zero:
            self.snapshots.save(self.step, float(module.last_loss), weights, self._model_part(trainer))
            self.record.save()  # whoever watches sees the loss so far
        self.snapshots.saved = self.step

    def _save_last(self, trainer: Trainer) -> None:
        self.record.save()  # the checkpoint stores the length of metrics.csv
        tensors, model, run = self._contents(trainer)
        checkpoints = self.checkpoints
        self._together(trainer, checkpoints.last, lambda: checkpoints.save_last(tensors, model, run))
        checkpoints.has_saved(self.step, self.validated)

    def _together(self, trainer: Trainer, path: Path, work: Any) -> None:
        together(work, path, trainer.is_global_zero, trainer.strategy.broadcast)

    def _contents(self, trainer: Trainer) -> tuple[dict[str, torch.Tensor], ModelPart, RunPart]:
        """What a checkpoint holds now; called on all processes."""
        data, module = _parts(trainer)
        if self.checkpoint:  # before the first batch: what it held
            tensors, loss_sums = (
                self.checkpoint.tensors,
                list(self.checkpoint.run.loss_sums if self.checkpoint.run else []),
            )
            place = self.resumed.place if self.resumed else 0
        else:
            tensors = gather(module, trainer.optimizers[0], trainer.is_global_zero)
            own = random_state(trainer.strategy.root_device), finite(float(self.record.loss_sum))
            states: list[Any] = [own] * trainer.world_size
            if trainer.world_size > 1:
                torch.distributed.all_gather_object(states, own)
            for rank, (random, _) in enumerate(states):
                tensors |= {f"random/{rank}/{name}": state for name, state in random.items()}
            loss_sums = [loss_sum for _, loss_sum in states]
            place = data.place + (self.step - self.first_step) * data.windows_per_update
        self.checkpoints.saves += 1
        scaler = getattr(trainer.precision_plugin, "scaler", None)
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
            skipped=module.guard.skipped,
            scale=scaler.state_dict() if scaler is not None else None,
            limits=as_dict(self.limits.known()),
            record=as_dict(self.record.counts()),
            loss_sums=loss_sums,
            best_loss=finite(self.checkpoints.best_loss),
        )
        return tensors, self._model_part(trainer), run

    def _model_part(self, trainer: Trainer) -> ModelPart:
        data, module = _parts(trainer)
        return ModelPart(
            config=module.config.to_dict(),
            tokenizer=data.tokenizer.to_dict(),
            bytes_per_token=data.bytes_per_token,
            template=data.prepared.meta.get("template"),
            adapters=self._adapters,
        )


def corpus_hash(data: TokenData) -> str:
    """Identifies a text by its tokens, whatever folder it is in."""
    meta = data.prepared.meta
    tokens = [meta["tokenizer"], {name: file["sha256"] for name, file in meta["files"].items()}]
    return hashlib.sha256(json.dumps(tokens, sort_keys=True).encode()).hexdigest()


def _parts(trainer: Trainer) -> tuple[TokenData, LanguageModel]:
    held: Any = trainer
    return held.datamodule, held.lightning_module


def _named(found: tuple[int, int, int] | None) -> str:
    if found is None:
        return "nothing"
    return f"step {found[0]}, save {found[2]} of session {found[1]}"
