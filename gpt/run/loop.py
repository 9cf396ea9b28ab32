"""What happens between two batches of a run: read `Loop.on_train_batch_end` from top to bottom.

Lightning computes a batch (`LanguageModel.training_step`). After the last batch of an update it clips the
gradients (`configure_gradient_clipping`, where the processes also agree on signals and on losses that are not
finite) and steps the optimizer and the schedule. Then this callback, the only one of a run, plans and
records. Lightning validates if the callback asks for it. Last, the callback keeps snapshots and saves
checkpoints.
"""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import Callback, Trainer

from gpt.data.module import TokenData
from gpt.errors import InputError
from gpt.files import file_sha256
from gpt.progress import report
from gpt.run.checkpoint import (
    LOSSES,
    Checkpoints,
    below,
    gather,
    load_optimizer,
    random_state,
    set_random_state,
)
from gpt.run.distributed import check_replicas
from gpt.run.folder import CONFIG, RunFolder, folder_of
from gpt.run.lightning_private import skip_sigterm_broadcast
from gpt.run.limits import Limits
from gpt.run.options import Options
from gpt.run.record import Record
from gpt.run.signals import remembered, stopped
from gpt.run.snapshots import Snapshots
from gpt.run.start import Start
from gpt.run.temperature import find_temperature
from gpt.training.guard import scaler_of
from gpt.training.lora import ALPHA
from gpt.training.module import VALIDATED, LanguageModel
from gpt.weights.adapters import without_adapters
from gpt.weights.checkpoint import ModelPart, checkpoints_of
from gpt.weights.formats.table import Weights
from gpt.weights.load import GPT


class Loop(Callback):
    """A run, from its first update or from the checkpoint that is resumed.

    `run` is the run's state, which a checkpoint holds; all parts of the run count in this object. Only the
    first process has files: `checkpoints`, `snapshots`, and the `model_part` that both are saved with.
    """

    def __init__(self, options: Options, module: LanguageModel, data: TokenData, begun: Start) -> None:
        self.options = options
        self.module = module
        self.data = data
        self.begun = begun
        self.run = begun.run
        self.tensors: Weights = begun.checkpoint.tensors if begun.checkpoint else {}
        self.limits = Limits(options, self.run, begun.plan, begun.minutes is not None)
        module.logs_itself = False
        module.first_step = self.run.step
        module.planned_steps = 1
        self.trainer: Trainer
        self.folder = folder_of(options.run)
        self._open = ExitStack()  # the record and the signals

    # -- before the first batch

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Open the folder and restore all but what `on_train_start` restores; the model is on its device."""
        run = self.run
        self.limits.count(self.data.updates_per_epoch)
        corpus = self.data.prepared.counts["train"].sha256  # independent of the text's folder
        other_text = run.corpus not in ("", corpus)
        run.corpus = corpus
        run.options = asdict(self.options)
        if trainer.strategy.broadcast(run) != run:
            what = "have to see the same checkpoints, options and text"
            raise InputError(f"process {trainer.global_rank} and process 0 {what}")
        if self.begun.checkpoint:
            optimizer: Any = trainer.optimizers[0]
            load_optimizer(self.module, optimizer, self.begun.checkpoint)
        self.folder, has_best = self._on_first(lambda: self._begin(other_text))
        if not has_best:
            run.best_loss = None
            run.stalled = 0
        self.data.place = run.place - run.place % (self.data.batch_size * trainer.world_size)  # whole batches

    def _begin(self, other_text: bool) -> tuple[Path, bool]:
        """Open the folder and set aside what does not belong to this run's past.

        Return the folder, and whether it has a best checkpoint.
        """
        run = self.run
        module = self.module
        self.files = files = self._claimed()
        top = files.top
        has_ended = top.is_file("summary.json")
        if has_ended:  # otherwise it was killed before it ended, and ends again
            self.limits.check_left()
        top.remove_unfinished()
        if not top.is_file(CONFIG):  # write it before anything else: it marks the folder as a run's
            self.write_config()
        self.checkpoints = Checkpoints(files, self.options.keep_checkpoints, self.begun.checkpoint, run)
        if other_text:
            report("the text is not the one that this run was trained on: the best checkpoint begins again")
            self.checkpoints.begin_best_again()
        if has_ended:
            top.remove("summary.json")
        self.snapshots = Snapshots(files, self.options.snapshot_megabytes, run.step)
        self.write_config()
        self.model_part = ModelPart(
            config=module.config.to_dict(),
            tokenizer=self.data.tokenizer.to_dict(),
            template=self.data.prepared.meta.template,
            adapters=self._adapters() if module.options.lora.rank else None,
        )
        return files.path, self.checkpoints.has_best

    def write_config(self) -> None:
        """Write the run's options."""
        with self.files.top.write(CONFIG) as file:
            file.write(yaml.safe_dump(self.run.options, sort_keys=False, allow_unicode=True))

    def _claimed(self) -> RunFolder:
        """Return the run's locked folder: the one locked before its checkpoint was read, or a new one."""
        claim = self.begun.claim
        existing = self.begun.folder
        files = claim.take(existing) if existing else claim.take_new(self.folder)
        if self.begun.checkpoint is None and (begun := checkpoints_of(files.path)):
            what = "another process has begun this run meanwhile: start again to resume it"
            raise InputError(f"{begun[0]} is there, {what}")
        return files

    def _adapters(self) -> dict[str, Any]:
        """Return the fields of `AdapterPart`, and write the fixed weights into the folder `base` once."""
        rank = self.module.options.lora.rank
        self.files.top.below("base").close()  # raises InputError if it is a link
        base = self.files.path / "base"
        if self.begun.checkpoint is None or not (base / "model.safetensors").is_file():
            weights = without_adapters(self.module.model.state_dict())
            GPT.from_weights(self.module.config, weights).save_pretrained(base)
        return {"rank": rank, "scale": ALPHA / rank, "base": file_sha256(base / "model.safetensors")}

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Restore the state that the first batch depends on: random generators and sums of losses."""
        run = self.run
        rank = trainer.global_rank
        skip_sigterm_broadcast(trainer)
        self._open.enter_context(remembered(self.module.guard))
        self.limits.begin(trainer.strategy.broadcast(self.begun.left))
        files = self.files if rank == 0 else None
        self.record = Record(files, run, self.options, self.data.context_length)
        self._open.callback(self.record.close)
        state = below(f"random/{rank}/", self.tensors)  # empty if the saved run had fewer processes
        self.record.loss_sum = state.pop(LOSSES, torch.tensor(0.0)).to(self.module.device)
        self._continue()
        set_random_state(state, self.options.seed_everything, rank, self.module.device)
        if run.scale and (scaler := scaler_of(trainer)):
            scaler.load_state_dict(run.scale)

    # -- between two batches

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        """Run after each batch; most of it only after the last batch of an update."""
        module = self.module
        run = self.run
        self.record.batch(module.last_term)
        if module.step == run.step:  # gradients accumulate; no update was made yet
            return
        run.step = module.step
        run.place = self.data.place + trainer.global_step * self.data.windows_per_update

        # 1. Decide how many updates there are, and whether this was the last.
        self.limits.update(self._agreed(self.record.elapsed()))

        # 2. Write a row of metrics.csv.
        if self.record.is_due():
            loss = float(trainer.strategy.reduce(self.record.loss_sum / run.batches))  # over all processes
            self.record.update(loss, module.last_learning_rate, float(module.last_gradient_norm))

        # 3. Validate; keeping and saving follow the validation.
        if self.limits.validates and trainer.enable_validation:
            self._paused = self.record.elapsed()
            trainer.val_check_batch = 1  # Lightning validates where this number divides the batches so far
        else:
            self._keep()

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Record the validation loss, and write a sample."""
        found = trainer.callback_metrics
        figures = {name: float(found[name]) for name in VALIDATED if name in found}
        model = self.module.model
        temperature = ratio = 1.0  # ratio: loss with the temperature / loss without it
        if self.options.temperature_scaling:
            temperature, ratio = self._on_first(lambda: find_temperature(model, self.data.prepared))
        self.record.validated(figures, model, self.data, temperature)
        elapsed = self.record.elapsed()
        seconds = elapsed - self._paused
        self.record.paused(seconds)
        self.limits.paused(self._agreed(seconds))
        self.limits.validated(ratio * figures["val_loss"], elapsed)
        self._keep(validated=True, temperature=temperature)

    def _keep(self, validated: bool = False, temperature: float = 1.0) -> None:
        """Keep the result of an update. A validation that was due is done, so no checkpoint has one pending.

        `temperature` is the one that the validation found; it is 1 for weights without a validation.
        """
        run = self.run
        guard = self.module.guard
        first = self.trainer.is_global_zero
        over = self.limits.is_over
        self._continue()
        if first and temperature != self.model_part.temperature:
            self.model_part = replace(self.model_part, temperature=temperature)

        # 4. Save a snapshot of the weights.
        if first and self.snapshots.is_due(run.step, last=over):
            self.snapshots.save(run.step, float(self.module.last_loss), gather(self.module), self.model_part)

        # 5. Save a checkpoint.
        regular = run.step % self.options.checkpoint_every == 0
        if over or validated or regular or guard.agreed or guard.agreed_save:
            self._save()
        guard.wants_save = first and self.checkpoints.is_late(run)

        # 6. Stop if any process has received a signal.
        if guard.agreed and not over:
            raise stopped(guard.agreed, run.step, self.folder)

    # -- parts

    def close(self) -> None:
        """Close the record and restore the signal handlers, however the run ended."""
        self._open.close()

    def _continue(self) -> None:
        """Set where the schedule and Lightning stop: after the last update. Request no validation yet."""
        self.module.plan(self.run.total)
        self.trainer.should_stop = self.limits.is_over
        self.trainer.val_check_batch = sys.maxsize

    def _agreed(self, seconds: float) -> float:
        """Return a time; where it decides something, all processes use the first one's."""
        return seconds if self.limits.seconds is None else self.trainer.strategy.broadcast(seconds)

    def _on_first(self, act: Callable[[], Any]) -> Any:
        """Call `act` on the first process and return its result on all; if it fails, all raise its error."""
        found: Any = None
        error: Exception | None = None
        if self.trainer.is_global_zero:
            try:
                found = act()
            except Exception as reason:
                error = reason
        found, error = self.trainer.strategy.broadcast((found, error))
        if error:
            raise error
        return found

    def _save(self) -> None:
        """Write a checkpoint: the weights, the optimizer's state, each process's own state, and `run`."""
        run = self.run
        trainer = self.trainer
        scaler = scaler_of(trainer)
        tensors = gather(self.module, trainer.optimizers[0])
        own = random_state(self.module.device)
        own[LOSSES] = self.record.loss_sum.to("cpu")
        states = [own] * trainer.world_size
        if trainer.world_size > 1:
            check_replicas(tensors, run.step)
            torch.distributed.all_gather_object(states, own)
        for rank, state in enumerate(states):
            tensors |= {f"random/{rank}/{name}": tensor for name, tensor in state.items()}
        run.scale = scaler.state_dict() if scaler else None
        self.record.note()
        self._on_first(lambda: self.checkpoints.save(tensors, self.model_part, run))
