"""Resuming a run exactly: which checkpoint (`find`), and what Lightning does not restore (`Resume`)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim.lr_scheduler import LambdaLR

from gpt.errors import InputError
from gpt.training.random_state import random_state, set_random_state
from gpt.training.record import Meter
from gpt.weights.checkpoint import RUNS, ProcessPart, StepPart, checkpoints_of, newest_run, read

AUTO, AUTO_OR_NEW = "auto", "auto_or_new"


@dataclass(frozen=True, kw_only=True)
class Found:
    """An intact checkpoint, and the options of its run."""

    path: Path
    step: int
    options: str
    """YAML, not to be trusted."""
    skipped: tuple[Path, ...] = ()
    """Newer checkpoints that are broken."""


def find(resume: str, run: str | None = None) -> Found | None:
    """The checkpoint to resume from.

    Args:
        resume: a checkpoint, a run's folder, "auto" for the newest intact checkpoint of a run, or
            "auto_or_new", which gives None if that run has no checkpoint.
        run: the name of a run under `runs/`; None for the newest.

    Raises:
        InputError: there is no checkpoint, or none is intact.
    """
    if resume not in (AUTO, AUTO_OR_NEW):
        return _newest(Path(resume)) if Path(resume).is_dir() else _open(Path(resume))
    if resume == AUTO_OR_NEW and run is None:
        raise InputError("--resume auto_or_new needs the name of the run: give it with --run")
    folder = RUNS / run if run is not None else newest_run()
    if folder is None:
        raise InputError(f"no checkpoint under {RUNS}/ to resume: start a run with 'gpt fit'")
    if resume == AUTO_OR_NEW and not checkpoints_of(folder):
        return None
    return _newest(folder)


def _newest(folder: Path) -> Found:
    """The newest intact checkpoint of a run."""
    broken: list[Path] = []
    for path in checkpoints_of(folder):
        try:
            found = _open(path)
        except InputError:
            broken.append(path)
            continue
        return Found(path=path, step=found.step, options=found.options, skipped=tuple(broken))
    if broken:
        names = ", ".join(file.name for file in broken)
        raise InputError(f"no intact checkpoint in {folder}, these are broken: {names}")
    raise InputError(f"no checkpoint in {folder} to resume")


def _open(path: Path) -> Found:
    saved = read(path)
    try:
        return Found(path=path, step=saved["global_step"], options=saved["run"]["options"])
    except (KeyError, TypeError):
        raise InputError(f"{path} does not say which options its run had: it cannot be resumed") from None


class Resume(Callback):
    """Restores the state of each process, and applies the optimizer's current options.

    Each process has its own random generators, so that dropout differs between them, and its own sum of
    losses since the last row of metrics.csv. If a run resumes with more processes than it had, the additional
    ones are seeded.

    Args:
        seed: the run's.
        meter: sums the losses.
    """

    def __init__(self, seed: int, meter: Meter) -> None:
        self.seed, self.meter = seed, meter
        self._states: list[ProcessPart] | None = None
        self._before: StepPart | None = None
        self._loops: dict[str, Any] = {}
        self._started = False
        self._groups: list[dict[str, Any]] = []  # the optimizer's current options

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check that all processes, which search for the checkpoint separately, found the same one.

        Raises:
            InputError: they did not.
        """
        first = trainer.strategy.broadcast(str(trainer.ckpt_path))
        if str(trainer.ckpt_path) != first:
            raise InputError(
                f"process {trainer.global_rank} resumes {trainer.ckpt_path}, process 0 {first}: "
                "all processes need to see the same files"
            )

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the states of all processes."""
        own = ProcessPart(
            random=random_state(trainer.strategy.root_device), loss_sum=float(self.meter.loss_sum)
        )
        states: list[Any] = [own]
        if trainer.world_size > 1:
            states = [None] * trainer.world_size
            torch.distributed.all_gather_object(states, own)
        checkpoint["processes"] = states
        checkpoint["step"] = step_size(trainer)

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Take the states and Lightning's batch counts."""
        self._states = checkpoint["processes"]
        self._before, self._loops = checkpoint["step"], checkpoint["loops"]["fit_loop"]
        if self._started:
            self._convert_counts(trainer)

    def _convert_counts(self, trainer: Trainer) -> None:
        """Convert Lightning's batch counts if a step now takes other batches."""
        before, now = self._before, step_size(trainer)
        if before is None or before == now:
            return
        progress = self._loops["epoch_loop.batch_progress"]
        for counts in (progress["total"], progress["current"]):
            steps = counts["ready"] // before["batches"] * before["windows"] // now["windows"]
            batches = steps * now["batches"]
            counts.update(ready=batches, started=batches, processed=batches, completed=batches - 1)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the optimizer's options before the checkpoint's replace them; the micro-batch is known now.

        Lightning loads a checkpoint before this hook, or after it where the strategy shards the model.
        """
        self._started = True
        self._convert_counts(trainer)
        groups = trainer.optimizers[0].param_groups
        self._groups = [{name: group[name] for name in group if name != "params"} for group in groups]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the generators and the optimizer's options just before the first step."""
        states, rank = self._states, trainer.global_rank
        if states is not None:
            sums = [state["loss_sum"] for state in states]
            same = len(states) == trainer.world_size
            self.meter.loss_sum = sums[rank] if same else sum(sums) / len(sums)
        if states is not None and rank < len(states):
            set_random_state(states[rank]["random"], trainer.strategy.root_device)
        elif rank > 0:
            torch.manual_seed(int(np.random.SeedSequence((self.seed, rank)).generate_state(1, np.uint64)[0]))
        if states is not None:
            self._apply_options(trainer)
        self._states = None

    def _apply_options(self, trainer: Trainer) -> None:
        """Use the current learning rates and so on; this changes nothing if they did not change."""
        groups, scheduler = trainer.optimizers[0].param_groups, trainer.lr_scheduler_configs[0].scheduler
        assert isinstance(scheduler, LambdaLR)
        scheduler.base_lrs = [current["initial_lr"] for current in self._groups]
        for group, current, factor in zip(groups, self._groups, scheduler.lr_lambdas, strict=True):
            group.update(current, lr=current["initial_lr"] * factor(scheduler.last_epoch))


def step_size(trainer: Trainer) -> StepPart:
    """Batches of a process, and windows of all processes, that make one step."""
    batches = trainer.accumulate_grad_batches
    windows = batches * trainer.world_size * trainer.datamodule.batch_size  # type: ignore[attr-defined]
    return StepPart(batches=batches, windows=windows)
