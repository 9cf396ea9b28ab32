"""A run between two batches: read `Loop.on_train_batch_end` from top to bottom.

Lightning computes a batch: `LanguageModel.training_step`, then the backward pass. After the last batch of an
update it clips the gradients (`configure_gradient_clipping`, where the processes also agree on signals and on
losses that are not finite) and steps the optimizer and the schedule. (For this last batch, Lightning makes
the optimizer call all that: `CombinedOptimizer.step` gets it as a closure.) Then this callback, the only one
of a run, plans and records. Lightning validates if the callback asks for it. Last, the callback keeps
snapshots and saves checkpoints.

`Loop` only calls the parts of a run in order and passes each what the others have found: `Limits` decides,
`Record` writes, `Store` saves. They know neither the Trainer nor one another.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor

from gpt.data.module import TokenData
from gpt.data.windows import Batch, WeightedBatch
from gpt.errors import InputError
from gpt.run.checkpoint import (
    LOSSES,
    below,
    gather,
    load_optimizer,
    random_state,
    set_random_state,
)
from gpt.run.distributed import check_replicas, on_first
from gpt.run.folder import folder_of
from gpt.run.lightning_private import ask_for_validation, skip_sigterm_broadcast
from gpt.run.limits import Limits
from gpt.run.loggers import Ending, open_loggers
from gpt.run.options import Options
from gpt.run.origin import Origin
from gpt.run.record import Record
from gpt.run.signals import Stopped, remembered, stopped
from gpt.run.store import Store, has_ended, locked_folder
from gpt.run.temperature import find_temperature
from gpt.training.guard import check_finite, scaler_of
from gpt.training.module import VALIDATED, LanguageModel
from gpt.training.optimizers.combined import CombinedOptimizer
from gpt.weights.formats.table import Weights


class Loop(Callback):
    """A run, from its first update or from the checkpoint that is resumed.

    `run` is the run's state, which a checkpoint holds. `LanguageModel.step` counts the updates; after each,
    `run.step` takes its value, and all else reads it there.
    """

    def __init__(self, options: Options, module: LanguageModel, data: TokenData, origin: Origin) -> None:
        self.options = options
        self.module = module
        self.data = data
        self.origin = origin
        self.run = origin.run
        self.tensors: Weights = origin.checkpoint.tensors if origin.checkpoint else {}
        self.limits = Limits(options, self.run, origin.plan, origin.minutes is not None)
        self.folder = folder_of(options.run)  # until `on_fit_start` reserves a free one
        self.store: Store | None = None  # only the first process has one
        self._loggers: list[Logger] = []  # of the first process
        self.record: Record  # made by `on_train_start`, from where it counts the time
        self._open = ExitStack()  # the record and the signals' handlers, until the run ends
        self._ending: Ending = "failed"

    # -- before the first batch

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Tell the module and the data where the run stands, before they make optimizers and batches."""
        run = self.run
        self.limits.set_steps_and_epochs(self.data.windows_per_epoch, self.data.windows_per_update)
        self.module.continue_from(run.step, run.total)
        self.data.place = run.place - run.place % (self.data.batch_size * trainer.world_size)  # whole batches

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the folder and restore the optimizer's state; the model is on its device.

        `gpt/run/fit.py` has loaded the weights, and `setup` has set the step.
        """
        run = self.run
        corpus = self.data.prepared.counts["train"].sha256  # independent of the text's folder
        new_best = self._why_new_best(corpus)
        run.corpus = corpus
        run.options = asdict(self.options)
        if trainer.strategy.broadcast(run) != run:
            what = "have to see the same checkpoints, options and text"
            raise InputError(f"process {trainer.global_rank} and process 0 {what}")
        if self.origin.checkpoint:
            optimizer = trainer.optimizers[0]
            assert isinstance(optimizer, CombinedOptimizer)
            load_optimizer(self.module, optimizer, self.origin.checkpoint)
        self.folder, has_best = on_first(trainer.strategy, lambda: self._open_store(new_best))
        if not has_best:  # there is none, or it was set aside: the next validation is the best
            run.begin_best_again()

    def _why_new_best(self, corpus: str) -> str:
        """Say why losses so far cannot be compared with those to come, so that the best begins again.

        Returns "" if they can.
        """
        run = self.run
        if run.corpus not in ("", corpus):
            return "the text is not the one that this run was trained on"
        scaling = self.options.temperature_scaling
        if run.options.get("temperature_scaling", scaling) != scaling:
            return "losses with temperature scaling are lower than those without"
        isolate = self.options.data.isolate
        if run.options.get("data", {}).get("isolate", isolate) != isolate:
            return "held-out text is scored with attention to other documents than before"
        return ""

    def _open_store(self, new_best: str) -> tuple[Path, bool]:
        """Open the run's folder; return it, and whether it has a best checkpoint."""
        if self.origin.folder is None:  # refuse before a folder is made
            self.limits.check_left()
        files = locked_folder(self.origin, self.options.run)
        if has_ended(files):  # one without a summary was killed after its last update: it may end again
            self.limits.check_left()
        run = self.run
        self.store = Store(files, self.options, self.origin, run, self.module, self.data, new_best)
        return files.path, self.store.checkpoints.has_best

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock and the record; restore sums of losses, random generators and the loss scale.

        The record starts the clock, by which the limits then decide how many updates there are. Only after
        that the schedule and the Trainer can be told.
        """
        run = self.run
        rank = trainer.global_rank
        device = self.module.device
        skip_sigterm_broadcast(trainer)
        self._open.enter_context(remembered(self.module.guard))
        state = below(f"random/{rank}/", self.tensors)  # empty if the saved run had fewer processes
        files = self.store.files if self.store else None
        on_first(trainer.strategy, self._open_loggers)
        self.record = Record(files, run, self.options, self.data.context_length, self._loggers)
        self._open.callback(lambda: self.record.close(self._ending))
        self.limits.begin(trainer.strategy.broadcast(self.origin.left))
        # A process that the saved run lacked takes the first one's sum, as the mean over all is recorded.
        of_first = self.tensors.get(f"random/0/{LOSSES}", torch.tensor(0.0))
        self.record.loss_sum = state.pop(LOSSES, of_first).to(device)
        self._apply_total(trainer)
        set_random_state(state, self.options.seed_everything, rank, device)
        scaler = scaler_of(trainer)
        if scaler and run.scale:
            scaler.load_state_dict(run.scale)

    def _open_loggers(self) -> None:
        """Open what the run is logged to, which may take seconds or fail. Then the run goes on."""
        assert self.store is not None  # this is the first process
        self._loggers = open_loggers(self.options.trainer.logger, self.store.files, self.run)
        self.store.remove_later(self.run)

    # -- between two batches

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: STEP_OUTPUT,
        batch: Batch | WeightedBatch,
        batch_idx: int,
    ) -> None:
        """Run after each batch; most of it only after the last batch of an update."""
        module = self.module
        run = self.run
        self.record.add_batch(module.last_term)
        if module.step == run.step:  # gradients accumulate; no update was made yet
            return
        run.step = module.step
        run.place = self.data.place + trainer.global_step * self.data.windows_per_update

        # 1. Decide how many updates there are, and whether this was the last.
        self.limits.update(self._agreed(trainer, self.record.elapsed()))

        # 2. Write a row of metrics.csv.
        if self.record.is_due():
            loss = trainer.strategy.reduce(self.record.loss_sum / run.batches)  # over all processes
            self.record.write_row(float(loss), module.last_learning_rate, float(module.last_gradient_norm))

        # 3. Ask for a validation: Lightning makes it after this hook, and `on_validation_end` does 4 to 6.
        # Without one they follow now.
        if self.limits.validates and trainer.enable_validation:
            ask_for_validation(trainer, True)
        else:
            self._keep(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the time of a validation."""
        self.record.pause()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the validation loss, and write a sample."""
        metrics = trainer.callback_metrics
        figures = {name: float(metrics[name]) for name in VALIDATED if name in metrics}
        model = self.module.model
        temperature = 1.0
        ratio = 1.0  # the loss with the temperature, divided by the loss without it
        if self.options.temperature_scaling:
            prepared = self.data.prepared
            isolate = self.data.options.isolate
            temperature, ratio = on_first(
                trainer.strategy, lambda: find_temperature(model, prepared, isolate)
            )
        self.record.validated(figures, model, self.data, temperature)
        seconds = self.record.go_on()
        elapsed = self._agreed(trainer, self.record.elapsed())
        self.limits.validated(ratio * figures["val_loss"], elapsed, self._agreed(trainer, seconds))
        self._keep(trainer, validated=True, temperature=temperature)

    def _keep(self, trainer: Trainer, validated: bool = False, temperature: float = 1.0) -> None:
        """Keep the result of an update. A due validation was made before, so a resumed run owes none.

        `temperature` is the one that the validation found; it is 1 for weights without a validation.
        """
        run = self.run
        module = self.module
        guard = module.guard
        is_over = self.limits.is_over
        self._apply_total(trainer)

        # 4. Save a snapshot of the weights.
        if self.store and self.store.snapshots.is_due(run.step, last=is_over):
            self.store.save_snapshot(run, float(module.last_loss), gather(module), temperature)

        # 5. Save a checkpoint.
        regular = run.step % self.options.checkpoint_every == 0
        if is_over or validated or regular or guard.agreed.signal or guard.agreed.save:
            self._save(trainer, temperature)
        if self.store:
            guard.asked.save = int(self.store.checkpoints.is_late(run))  # asks for one after the next update

        # 6. Stop if any process has received a signal.
        if guard.agreed.signal and not is_over:
            raise stopped(guard.agreed.signal, run.step, self.folder)

    # -- at the end

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Close the record and restore the signals' handlers: the run has come to its end."""
        self._ending = "success"
        self._open.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Close them too: a signal or an error has ended the run."""
        self._ending = "aborted" if isinstance(exception, Stopped | KeyboardInterrupt) else "failed"
        self._open.close()

    # -- parts

    def _apply_total(self, trainer: Trainer) -> None:
        """Tell the schedule and Lightning where the run ends at present. Ask for no validation yet."""
        self.module.set_total_steps(self.run.total)
        trainer.should_stop = self.limits.is_over
        ask_for_validation(trainer, False)

    def _agreed(self, trainer: Trainer, seconds: float) -> float:
        """Return a time; where it decides something, all processes use the first one's."""
        return trainer.strategy.broadcast(seconds) if self.limits.has_time else seconds

    def _save(self, trainer: Trainer, temperature: float) -> None:
        """Write a checkpoint: the weights, the optimizer's state, each process's own state, and `run`."""
        run = self.run
        scaler = scaler_of(trainer)
        check_finite(self.module, run.step)
        tensors = gather(self.module, trainer.optimizers[0])
        own: dict[str, Tensor] = {
            **random_state(self.module.device),
            LOSSES: self.record.loss_sum.to("cpu"),
        }
        states: list[Mapping[str, Tensor]] = [own] * trainer.world_size
        if trainer.world_size > 1:
            check_replicas(tensors, run.step)
            torch.distributed.all_gather_object(states, own)
        for rank, state in enumerate(states):
            tensors |= {f"random/{rank}/{name}": tensor for name, tensor in state.items()}
        run.scale = scaler.state_dict() if scaler else None
        self.record.note()
        on_first(trainer.strategy, lambda: self._write_checkpoint(tensors, temperature))

    def _write_checkpoint(self, tensors: Weights, temperature: float) -> None:
        assert self.store is not None  # this is the first process
        self.store.save_checkpoint(self.run, tensors, temperature)
