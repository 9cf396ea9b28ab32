"""Going on with a run exactly where a checkpoint left it.

Which checkpoint and which options (`find`, `changes`), and what Lightning does not restore (`Resume`).
"""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim.lr_scheduler import LambdaLR

from gpt.errors import InputError
from gpt.training.record import Meter
from gpt.weights.load import RUNS, read

AUTO, AUTO_OR_NEW = "auto", "auto_or_new"

_FIXED = ("model.config.", "model.optimizer.name")  # what the saved tensors have the shape of
_FREE = ("model.config.dropout",)
_NOT_OPTIONS = ("run", "resume", "ckpt_path", "weights_only", "trainer.default_root_dir", "model.init_from")


@dataclass(frozen=True, kw_only=True)
class Found:
    """A whole checkpoint, and the options of its run."""

    path: Path
    step: int
    options: str
    """YAML."""
    passed_over: tuple[Path, ...] = ()
    """Newer ones that are broken."""


def find(resume: str, run: str | None = None) -> Found | None:
    """The checkpoint to go on from.

    Args:
        resume: a checkpoint, a run's folder, "auto" for the newest whole checkpoint of a run, or
            "auto_or_new", which gives None where that run has none at all.
        run: the name of a run under `runs/`; None for the newest.

    Raises:
        InputError: there is none, or none that is whole.
    """
    if resume not in (AUTO, AUTO_OR_NEW):
        return _newest(Path(resume)) if Path(resume).is_dir() else _open(Path(resume))
    if resume == AUTO_OR_NEW and run is None:
        raise InputError("--resume auto_or_new needs to know which run: name it with --run")
    folder = RUNS / run if run is not None else _newest_run()
    if resume == AUTO_OR_NEW and not checkpoints_of(folder):
        return None
    return _newest(folder)


def checkpoints_of(folder: Path) -> list[Path]:
    """The checkpoints of a run, the newest first; SLURM's are in the folder itself."""
    files = [*folder.glob("checkpoints/*.ckpt"), *folder.glob("hpc_ckpt_*.ckpt")]
    return sorted(files, key=_saved_at, reverse=True)


def _saved_at(path: Path) -> float:
    """Seconds since 1970, as the checkpoint says: copying a run changes the times of its files."""
    try:
        return float(torch.load(path, mmap=True, weights_only=True)["run"]["saved_at"])
    except Exception:  # a broken file can fail in any way
        return path.stat().st_mtime


def _newest_run() -> Path:
    runs = [folder for folder in RUNS.glob("*") if checkpoints_of(folder)]
    if not runs:
        raise InputError(f"no checkpoint under {RUNS}/ to go on from: start a run with 'gpt fit'")
    return max(runs, key=lambda run: max(file.stat().st_mtime for file in checkpoints_of(run)))


def _newest(folder: Path) -> Found:
    """The newest whole checkpoint of a run."""
    broken: list[Path] = []
    for path in checkpoints_of(folder):
        try:
            found = _open(path)
        except InputError:
            broken.append(path)
            continue
        return Found(path=path, step=found.step, options=found.options, passed_over=tuple(broken))
    if broken:
        names = ", ".join(file.name for file in broken)
        raise InputError(f"no whole checkpoint in {folder}, these are broken: {names}")
    raise InputError(f"no checkpoint in {folder} to go on from")


def _open(path: Path) -> Found:
    saved = read(path)
    try:
        return Found(path=path, step=saved["global_step"], options=saved["run"]["options"])
    except (KeyError, TypeError):
        raise InputError(f"{path} does not say which options its run had: it cannot be resumed") from None


def run_folder(checkpoint: Path) -> Path | None:
    """The run that a checkpoint lies in; None for one that was moved elsewhere."""
    folder = checkpoint.parents[1] if checkpoint.parent.name == "checkpoints" else checkpoint.parent
    return folder if (folder / "config.yaml").is_file() else None


def changes(saved: str, now: str) -> list[str]:
    """The options that differ, as `name: old -> new`; both in YAML.

    Raises:
        InputError: one that the saved weights do not allow to change.
    """
    old, new = _flat(yaml.safe_load(saved)), _flat(yaml.safe_load(now))
    changed = []
    for name in sorted({*old, *new} - set(_NOT_OPTIONS)):
        if old.get(name) == new.get(name):
            continue
        if name.startswith(_FIXED) and name not in _FREE:
            raise InputError(f"{name} is {old.get(name)} in the checkpoint and cannot become {new.get(name)}")
        changed.append(f"{name}: {old.get(name)} -> {new.get(name)}")
    return changed


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


class Resume(Callback):
    """Restores what each process has for itself and lets the options of today count.

    A process has random generators of its own, so that dropout differs between them, and the losses it has
    seen since the last row of metrics.csv. In a run that goes on with more processes than it had, the
    additional ones draw their own numbers.

    Args:
        folder: the run's.
        seed: the run's.
        meter: adds up the losses.
    """

    def __init__(self, folder: Path, seed: int, meter: Meter) -> None:
        self.folder, self.seed, self.meter = folder, seed, meter
        self._states: list[dict[str, Any]] | None = None
        self._groups: list[dict[str, Any]] = []  # the optimizer's options of today

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """See that all processes, each of which chose for itself, do the same.

        Raises:
            InputError: they do not.
        """
        chosen = str(self.folder), str(trainer.ckpt_path)
        first = trainer.strategy.broadcast(chosen)
        if chosen != first:
            raise InputError(
                f"process {trainer.global_rank} goes on from {chosen[1]} in {chosen[0]}, "
                f"process 0 from {first[1]} in {first[0]}: all need to see the same files"
            )

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the states of all processes."""
        own = {"random": random_state(trainer.strategy.root_device), "loss_sum": float(self.meter.loss_sum)}
        states: list[Any] = [own]
        if trainer.world_size > 1:
            states = [None] * trainer.world_size
            torch.distributed.all_gather_object(states, own)
        checkpoint["processes"] = states
        checkpoint["step"] = step_size(trainer)

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Take the states; count batches anew where another number of them, or larger ones, make a step."""
        self._states = checkpoint["processes"]
        before, now = checkpoint["step"], step_size(trainer)
        if before == now:
            return
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        for counts in (progress["total"], progress["current"]):
            steps = counts["ready"] // before["batches"] * before["windows"] // now["windows"]
            batches = steps * now["batches"]
            counts.update(ready=batches, started=batches, processed=batches, completed=batches - 1)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the optimizer's options before the checkpoint's take their place."""
        groups = trainer.optimizers[0].param_groups
        self._groups = [{name: group[name] for name in group if name != "params"} for group in groups]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the generators and apply the optimizer's options, just before the first step."""
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
        """Let learning rates and so on be today's; where they did not change, this changes nothing."""
        groups, scheduler = trainer.optimizers[0].param_groups, trainer.lr_scheduler_configs[0].scheduler
        assert isinstance(scheduler, LambdaLR)
        scheduler.base_lrs = [today["initial_lr"] for today in self._groups]
        for group, today, factor in zip(groups, self._groups, scheduler.lr_lambdas, strict=True):
            group.update(today, lr=today["initial_lr"] * factor(scheduler.last_epoch))


def step_size(trainer: Trainer) -> dict[str, int]:
    """Batches of a process, and windows of all processes, that make one step."""
    batches = trainer.accumulate_grad_batches
    windows = batches * trainer.world_size * trainer.datamodule.batch_size  # type: ignore[attr-defined]
    return {"batches": batches, "windows": windows}


def random_state(device: torch.device) -> dict[str, Any]:
    """The state of Python's, numpy's, torch's and the device's generator, in plain values and tensors."""
    version, words, gauss = random.getstate()
    numpy = np.random.get_state(legacy=False)
    state: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": {**numpy, "state": {**numpy["state"], "key": numpy["state"]["key"].tolist()}},
        "torch": torch.get_rng_state(),
    }
    if device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state()
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """The inverse of `random_state`; a device of another kind than the saved one keeps its own state."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    key = np.array(state["numpy"]["state"]["key"], np.uint32)
    np.random.set_state({**state["numpy"], "state": {**state["numpy"]["state"], "key": key}})
    torch.set_rng_state(state["torch"])
    if device.type in state:
        torch.get_device_module(device).set_rng_state(state[device.type])
