"""Writing a run's checkpoints, each of which is whole or not there, and continuing from one."""

import os
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from gpt.errors import InputError
from gpt.files import atomic_write
from gpt.run.folder import RunFolder
from gpt.training.module import LanguageModel
from gpt.training.optimizers.state import places, tensors_of
from gpt.training.shard import part_of, whole
from gpt.weights.adapters import adapters_of
from gpt.weights.checkpoint import (
    SUFFIX,
    Checkpoint,
    ModelPart,
    RunPart,
    checkpoints_of,
    next_session,
    read,
    write,
)
from gpt.weights.formats.table import Weights

_SECONDS_BETWEEN = 60.0
_PART_BETWEEN = 0.01  # of the run


class Checkpoints:
    """Keeps the newest checkpoint, `last`, those before it, `step-N`, and `best`, of the lowest validation.

    The newest `keep` are kept.
    """

    def __init__(self, folder: RunFolder, keep: int) -> None:
        self.run, self.keep = folder, keep
        self.best_loss = float("inf")
        self.session = self.saves = 0
        self.saved = (0, False)  # the step in the newest one, and whether its validation is part of it
        self._at = 0.0

    def begin(self, step: int, resumed: Checkpoint | None, other_text: bool) -> None:
        """Number this session, and set aside what is of another future or text; one process does it."""
        self.session = next_session(self.run / "")
        for file in (self.run / "").rglob(".*.tmp"):
            file.unlink(missing_ok=True)
        if resumed is None or self.last.resolve() != resumed.path.resolve():
            _set_aside(self.last, "step-")
        _set_aside(self.best, "best-step-", -1 if other_text else step)
        if not self.best.is_file():
            self.best_loss = float("inf")

    @property
    def last(self) -> Path:
        """The newest one."""
        return self.run / f"checkpoints/last{SUFFIX}"

    @property
    def best(self) -> Path:
        """That of the lowest validation loss."""
        return self.run / f"checkpoints/best{SUFFIX}"

    def is_late(self, step: int, total: int) -> bool:
        """Whether a minute and a hundredth of the run have passed since the last one."""
        seconds = time.monotonic() - self._at
        return seconds >= _SECONDS_BETWEEN and step - self.saved[0] >= _PART_BETWEEN * total

    def set_back(self, step: int) -> None:
        """Name the newest one by its step, unless it is of this one."""
        if not self.last.is_file() or step <= self.saved[0]:
            return
        earlier = self.last.with_name(f"step-{self.saved[0]}{SUFFIX}")
        earlier.unlink(missing_ok=True)
        try:  # the file exists under one of its two names at any moment
            os.link(self.last, earlier)
        except OSError:  # a file system without links
            os.replace(self.last, earlier)

    def forget_old(self) -> None:
        """Delete those that are too old."""
        newest_first = checkpoints_of(self.run / "", broken_first=False)
        older = [file for file in newest_first if file.name.startswith("step-")]
        for file in older[self.keep - 1 :]:
            file.unlink(missing_ok=True)

    def has_saved(self, step: int, validated: bool) -> None:
        """Note what the newest one holds, on every process."""
        self.saved, self._at = (step, validated), time.monotonic()


def save(path: Path, tensors: Weights, model: ModelPart, run: RunPart | None) -> None:
    """Write a checkpoint, atomically: an OSError leaves the old file unchanged."""
    with atomic_write(path, "wb") as file:
        write(file, tensors, model, run)


def gather(module: LanguageModel, optimizer: Optimizer | None, first: bool) -> Weights:
    """The weights by a GPT's names, or the adapters alone, and the optimizer's state.

    Called on all processes. On the first they are whole and on the CPU, the others get nothing.
    """
    state = module.model.state_dict()
    if module.options.lora.rank:
        state = adapters_of(state)
    elif module.config.tie_embeddings:
        del state["head.weight"]
    if optimizer is not None:
        kept = tensors_of(module.model, optimizer).items()
        state |= {f"optimizer/{name}": tensor for name, tensor in kept}
    found: Weights = {}
    for name, tensor in state.items():
        gathered = whole(tensor)
        if first:
            found[name] = gathered.detach().to("cpu")
    return found


def load_weights(module: LanguageModel, weights: Weights) -> None:
    """Put a checkpoint's weights, or adapters, in the place of the module's."""
    module.model.load_state_dict(weights, strict=False)  # start.py has checked that they are all there


@torch.no_grad()
def load_optimizer(module: LanguageModel, optimizer: Optimizer, tensors: Weights) -> None:
    """Restore the optimizer's state; its options stay those of today."""
    saved: dict[str, Weights] = {}
    for name, tensor in tensors.items():
        kind, _, rest = name.partition("/")
        if kind == "optimizer":
            weight, _, key = rest.rpartition("/")
            saved.setdefault(weight, {})[key] = tensor
    for weight, parameter, state in places(module.model, optimizer):
        for key, tensor in saved.get(weight, {}).items():
            if key == "master":
                parameter.copy_(part_of(tensor, parameter))
            else:
                state[key] = part_of(tensor.clone(), parameter)


def random_state(device: torch.device) -> dict[str, Tensor]:
    """The states of torch's generators of this process, which dropout uses."""
    state = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state()
    return state


def set_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    """The inverse of `random_state`; a device of another kind than the saved one keeps its own state."""
    torch.set_rng_state(state["cpu"])
    if device.type != "cpu" and device.type in state:
        torch.get_device_module(device).set_rng_state(state[device.type])


def load_random_state(tensors: Weights, seed: int, rank: int, device: torch.device) -> None:
    """Restore this process's generators, or seed those of a further process than the run had."""
    prefix = f"random/{rank}/"
    found = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    if found:
        set_random_state({name: tensor.clone() for name, tensor in found.items()}, device)
    elif rank > 0:
        torch.manual_seed(int(np.random.SeedSequence((seed, rank)).generate_state(1, np.uint64)[0]))


def _set_aside(file: Path, prefix: str, after: int = -1) -> None:
    """Name a checkpoint by its step, if that is later than `after`, or as broken."""
    if not file.is_file():
        return
    try:
        run = read(file).run
        step = run.step if run else 0
    except InputError:
        os.replace(file, f"{file}.broken")
        return
    if step > after:
        os.replace(file, file.with_name(f"{prefix}{step}{SUFFIX}"))
