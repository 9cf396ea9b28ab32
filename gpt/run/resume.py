"""Resuming a run exactly: which checkpoint (`find`), and what Lightning does not restore (`Resume`)."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, Trainer

from gpt.errors import InputError
from gpt.run.record import Meter
from gpt.weights.checkpoint import RUNS, checkpoints_of, newest_run, read

AUTO_OR_NEW = "auto_or_new"


@dataclass(frozen=True, kw_only=True)
class Found:
    """An intact checkpoint, and the options of its run."""

    path: Path
    step: int
    options: str  # YAML, not to be trusted
    skipped: tuple[Path, ...] = ()  # newer checkpoints that are broken


def find(resume: str, run: str | None = None) -> Found | None:
    """The checkpoint to resume from; InputError if there is none, or none is intact.

    `resume` is a checkpoint, a run's folder, "auto" for the newest intact checkpoint of `run`, by default the
    newest run, or "auto_or_new", which gives None if `run` has no checkpoint.
    """
    if resume not in ("auto", AUTO_OR_NEW):
        return _newest(Path(resume)) if Path(resume).is_dir() else _open(Path(resume))
    if resume == AUTO_OR_NEW and run is None:
        raise InputError("--resume auto_or_new needs the name of the run: give it with --run")
    folder = RUNS / run if run is not None else newest_run()
    if folder is None:
        raise InputError(f"no checkpoint under {RUNS}/ to resume: start a run with 'gpt fit'")
    return None if resume == AUTO_OR_NEW and not checkpoints_of(folder) else _newest(folder)


def _newest(folder: Path) -> Found:
    broken: list[Path] = []
    for path in checkpoints_of(folder):
        try:
            return _open(path, skipped=tuple(broken))
        except InputError:
            broken.append(path)
    why = f", these are broken: {', '.join(file.name for file in broken)}" if broken else ""
    raise InputError(f"no checkpoint in {folder} to resume{why}")


def _open(path: Path, skipped: tuple[Path, ...] = ()) -> Found:
    saved = read(path)
    try:
        options = saved["run"]["options"]
        return Found(path=path, step=saved["global_step"], options=options, skipped=skipped)
    except (KeyError, TypeError):
        raise InputError(f"{path} does not say which options its run had: it cannot be resumed") from None


class Resume(Callback):
    """Restores the state of each process, and applies the optimizer's current options.

    Each process has its own random generators, so that dropout differs between them, and its own sum of
    losses since the last row of metrics.csv. Processes that the run did not have are seeded.
    """

    def __init__(self, seed: int, meter: Meter) -> None:
        self.seed, self.meter = seed, meter
        self._saved: dict[str, Any] = {}  # the checkpoint's states, size of a step, and loops
        self._groups: list[dict[str, Any]] = []  # the optimizer's current options, once training begins

    def on_save_checkpoint(self, trainer: Trainer, _: Any, checkpoint: dict[str, Any]) -> None:
        generators = random_state(trainer.strategy.root_device)
        own = {"random": generators, "loss_sum": float(self.meter.loss_sum)}
        states: list[Any] = [own] * trainer.world_size
        if trainer.world_size > 1:
            torch.distributed.all_gather_object(states, own)
        checkpoint["processes"] = states
        checkpoint["step"] = step_size(trainer)

    def on_load_checkpoint(self, trainer: Trainer, _: Any, checkpoint: dict[str, Any]) -> None:
        self._saved = {name: checkpoint[name] for name in ("processes", "step", "loops")}
        if self._groups:
            self._convert_counts(trainer)

    def _convert_counts(self, trainer: Trainer) -> None:
        """Convert Lightning's batch counts if a step now takes other batches."""
        now = step_size(trainer)
        if (before := self._saved.get("step", now)) == now:
            return
        progress = self._saved["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        for counts in (progress["total"], progress["current"]):
            steps = counts["ready"] // before["batches"] * before["windows"] // now["windows"]
            batches = steps * now["batches"]
            counts.update(ready=batches, started=batches, processed=batches, completed=batches - 1)

    def on_fit_start(self, trainer: Trainer, *_: Any) -> None:
        """Note the optimizer's options before the checkpoint's replace them; the micro-batch is known now.

        Lightning loads a checkpoint before this hook, or after it where the strategy shards the model.
        """
        self._convert_counts(trainer)
        groups = trainer.optimizers[0].param_groups
        self._groups = [{name: group[name] for name in group if name != "params"} for group in groups]

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        states, rank = self._saved.get("processes", []), trainer.global_rank
        if rank < len(states):
            set_random_state(states[rank]["random"], trainer.strategy.root_device)
        elif rank > 0:
            torch.manual_seed(int(np.random.SeedSequence((self.seed, rank)).generate_state(1, np.uint64)[0]))
        if states:
            sums = [state["loss_sum"] for state in states]
            same = len(states) == trainer.world_size
            self.meter.loss_sum = sums[rank] if same else sum(sums) / len(sums)
            # The current learning rates and so on: this changes nothing if they did not change.
            scheduler: Any = trainer.lr_scheduler_configs[0].scheduler
            groups = trainer.optimizers[0].param_groups
            scheduler.base_lrs = [current["initial_lr"] for current in self._groups]
            for group, current, factor in zip(groups, self._groups, scheduler.lr_lambdas, strict=True):
                group.update(current, lr=current["initial_lr"] * factor(scheduler.last_epoch))


def step_size(trainer: Trainer) -> dict[str, int]:
    """Batches of a process, and windows of all processes, that make one step."""
    batches = trainer.accumulate_grad_batches
    windows = batches * trainer.world_size * trainer.datamodule.batch_size  # type: ignore[attr-defined]
    return {"batches": batches, "windows": windows}


def random_state(device: torch.device) -> dict[str, Any]:
    """The state of the generators of Python, numpy, torch and the device, as plain values and tensors."""
    version, words, gauss = random.getstate()
    numpy: Any = np.random.get_state(legacy=False)
    numpy["state"]["key"] = numpy["state"]["key"].tolist()
    python = [version, list(words), gauss]
    state: dict[str, Any] = {"python": python, "numpy": numpy, "torch": torch.get_rng_state()}
    if device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state()
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """The inverse of `random_state`; a device of another kind than the saved one keeps its own state."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if device.type in state:
        torch.get_device_module(device).set_rng_state(state[device.type])
