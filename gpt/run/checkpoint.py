"""Writing a run's checkpoints, each of which is whole or not there, and continuing from one."""

import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from gpt.errors import InputError
from gpt.files import atomic_write
from gpt.training.module import LanguageModel
from gpt.weights.adapters import adapters_of
from gpt.weights.checkpoint import SUFFIX, Checkpoint, ModelPart, RunPart, checkpoints_of, read, write
from gpt.weights.formats.table import Weights

LOSSES = "losses"  # what is saved beside a process's generators: the sum since the last row of metrics.csv
_SECONDS_BETWEEN = 60.0
_PART_BETWEEN = 0.01  # of the run


class Checkpoints:
    """Keeps the newest checkpoint, `last`, those before it, `step-N`, and `best`, of the lowest validation.

    A save writes `last`, and where it is the best, `best` becomes a further name of this file. The newest
    `keep` are kept, by the first process. What is of another future than the one that is `resumed`, of which
    `run` tells, is set aside, and what a kill between the two left undone is made good.
    """

    def __init__(self, folder: Path, keep: int, resumed: Checkpoint | None, run: RunPart) -> None:
        self.folder = folder
        self.keep = keep
        self.last, self.best = (checkpoint_of(folder, name) for name in ("last", "best"))
        self._saved = run.step  # the step of the newest one
        self._at = time.monotonic()  # when it was written
        for file in folder.rglob(".*.tmp"):
            file.unlink(missing_ok=True)
        last = self.last.resolve()
        path = resumed.path.resolve() if resumed else None
        if path and path.parent == last.parent and run.best_step == run.step > _step_of(self.best):
            also_called(path, self.best)
        if path != last:
            set_aside(self.last, "step-")
        if not 0 <= _step_of(self.best) <= run.step:
            set_aside(self.best, "best-step-")

    def is_late(self, run: RunPart) -> bool:
        """Whether a minute and a hundredth of the run have passed since the last one."""
        seconds = time.monotonic() - self._at
        return seconds >= _SECONDS_BETWEEN and run.step - self._saved >= _PART_BETWEEN * run.total

    def save(self, tensors: Weights, model: ModelPart, run: RunPart) -> None:
        """Write the newest; an OSError leaves all files as they were."""
        try:
            if self.last.is_file():
                also_called(self.last, checkpoint_of(self.folder, f"step-{self._saved}"))
            save(self.last, tensors, model, run)
            if run.best_step == run.step:
                also_called(self.last, self.best)
        except OSError as error:
            why = f"{error.strerror}; the earlier checkpoints are intact"
            raise OSError(error.errno, why, str(self.last)) from error
        self._saved = run.step
        self._at = time.monotonic()
        newest_first = checkpoints_of(self.folder, broken_first=False)
        older = [file for file in newest_first if file.name.startswith("step-")]
        for file in older[self.keep - 1 :]:
            file.unlink(missing_ok=True)


def checkpoint_of(run: Path, name: str) -> Path:
    """Where a run's checkpoint of this name is."""
    return run / f"checkpoints/{name}{SUFFIX}"


def save(path: Path, tensors: Weights, model: ModelPart, run: RunPart | None) -> None:
    """Write a checkpoint, atomically: an OSError leaves the old file unchanged."""
    with atomic_write(path, "wb") as file:
        write(file, tensors, model, run)


def also_called(file: Path, name: Path) -> None:
    """Give a file a further name; at any moment that is the name of this file or of what had it before."""
    temporary = name.with_name(f".{name.name}.tmp")
    try:
        os.link(file, temporary)
    except OSError:  # a file system without links
        shutil.copyfile(file, temporary)
    os.replace(temporary, name)
    temporary.unlink(missing_ok=True)  # it stays where both were one file


def gather(module: LanguageModel, optimizer: Optimizer | None = None) -> Weights:
    """The weights by a GPT's names, or the adapters alone, and the optimizer's state."""
    state = module.model.state_dict()
    if module.options.lora.rank:
        state = adapters_of(state)
    elif module.config.tie_embeddings:
        del state["head.weight"]
    if optimizer is not None:
        for name, weight in module.model.named_parameters():
            kept = optimizer.state.get(weight, {})
            state |= {f"optimizer/{name}/{key}": tensor for key, tensor in kept.items()}
    return state


def load_optimizer(module: LanguageModel, optimizer: Optimizer, tensors: Weights) -> None:
    """Restore the optimizer's state; its options stay those of today."""
    for name, weight in module.model.named_parameters():
        for key, tensor in below(f"optimizer/{name}/", tensors).items():
            optimizer.state[weight][key] = tensor.to(weight.device, copy=True)


def random_state(device: torch.device) -> dict[str, Tensor]:
    """The states of torch's generators of this process, which dropout uses, by the kinds of their devices."""
    return {kind: generator.get_rng_state() for kind, generator in _generators(device).items()}


def set_random_state(state: dict[str, Tensor], seed: int, rank: int, device: torch.device) -> None:
    """Restore this process's generators, or seed those of a further process than the run had.

    A device of another kind than the saved one keeps its own state.
    """
    if not state and rank > 0:
        torch.manual_seed(int(np.random.SeedSequence((seed, rank)).generate_state(1, np.uint64)[0]))
    for kind, generator in _generators(device).items():
        if kind in state:
            generator.set_rng_state(state[kind])


def _generators(device: torch.device) -> dict[str, Any]:
    """What has the generators of the device and, in the place of `torch.cpu`, of the CPU."""
    return {device.type: torch.get_device_module(device), "cpu": torch}


def below(prefix: str, tensors: Weights) -> Weights:
    """The tensors under a prefix, by the rest of their names."""
    return {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def set_aside(file: Path, prefix: str) -> None:
    """Name a checkpoint by its step, or as broken."""
    step = _step_of(file)
    if file.is_file():
        os.replace(file, f"{file}.broken" if step < 0 else file.with_name(f"{prefix}{step}{SUFFIX}"))


def _step_of(file: Path) -> int:
    """The step of a checkpoint, -1 of none or a broken one."""
    try:
        run = read(file).run
    except InputError:
        return -1
    return run.step if run else 0
