"""Write a run's checkpoints atomically, and continue from one."""

import time
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from gpt.errors import InputError
from gpt.run.folder import RunFolder
from gpt.training.module import LanguageModel
from gpt.training.optimizers.combined import CombinedOptimizer
from gpt.weights.adapters import adapters_of
from gpt.weights.checkpoint import Checkpoint, LaterFormat, ModelPart, Order, RunPart, read, write
from gpt.weights.formats.table import Weights
from gpt.weights.runs import BEST, NEWEST, SUFFIX, checkpoints_of, next_session, order_of

LOSSES = "losses"  # key of the loss summed since the last row of metrics.csv, saved for each process
RECORDS = ("metrics.csv", "samples.txt")  # files that grow while a run trains
_SECONDS_BETWEEN = 60.0
_PART_BETWEEN = 0.01  # fraction of the run's updates


class Checkpoints:
    """A run's checkpoints: the newest `last`, earlier ones `step-N`, and `best`, with the lowest loss.

    A save writes `last`. If it is the best so far, `best` becomes a second name of the same file. The first
    process keeps the newest `keep` checkpoints. Each save first checks that `last` is still the file that
    this process has read or written: where locks do not work, another process may have resumed the run
    meanwhile, and its checkpoints must not be overwritten.

    A run may be resumed from an older checkpoint. A later `last`, and the `best` of what it leaves, are then
    set aside under names that no save uses; a later `step-N` may be replaced. The older one is written as
    `last` before anything else: so the newest checkpoint always belongs to the resumed run. If an earlier
    process was killed between two steps of this, they are completed now.
    """

    def __init__(self, folder: RunFolder, keep: int, step: int) -> None:
        """Look at the checkpoints of a run after `step` updates. `take_over` comes before the first save."""
        self.folder = folder
        self.files = folder.checkpoints
        self.keep = keep
        self.best = self.files.path / BEST
        self._saved = step  # step of the newest checkpoint
        self._at = time.monotonic()  # when the newest checkpoint was written
        self._order_of_last = self._order_of(NEWEST)  # as this process read or wrote it

    def take_over(self, resumed: Checkpoint | None, run: RunPart) -> None:
        """Set aside a later `last` and another branch's `best`; make the resumed checkpoint the newest.

        | resumed from        | `last`                              | `best`                              |
        | ------------------- | ----------------------------------- | ----------------------------------- |
        | `last`              | stays                               | stays                               |
        | an older checkpoint | is set aside, the older one follows | is set aside if a later step set it |
        | nothing, a new run  | is set aside, if there is a file    | is set aside, if there is a file    |

        What is set aside and broken gets a name that ends in `.broken`, under which nothing looks for it.
        """
        self.files.remove_unfinished()
        newest = self._newest()
        order = run.order if resumed else None  # the resumed checkpoint's, as it was read
        run.session = next_session(self.folder.path)
        if self.files.is_file(NEWEST) and (order is None or self._order_of_last != order):
            self._set_last_aside()
        if resumed and newest and order != newest:
            self._write(resumed.tensors, resumed.model, run)
        if not self._is_best_of(run):
            self.begin_best_again()
            if resumed and run.best_step == run.step and self._is_here(resumed.path):
                self.files.also_called(resumed.path.name, BEST)

    def _is_best_of(self, run: RunPart) -> bool:
        """Whether `best` is this run's best, by step and loss: another branch may have written it."""
        try:
            best = read(self.best).run
        except InputError:
            return False
        return best is not None and (best.step, best.best_loss) == (run.best_step, run.best_loss)

    @property
    def has_best(self) -> bool:
        """Whether a best checkpoint exists."""
        return self.files.is_file(BEST)

    def begin_best_again(self) -> None:
        """Set the best checkpoint aside, if there is one."""
        if self.has_best:
            self._set_aside(BEST)
            self.files.remove(BEST)

    def is_late(self, run: RunPart) -> bool:
        """Whether both a minute and a hundredth of the run have passed since the last checkpoint."""
        seconds = time.monotonic() - self._at
        return seconds >= _SECONDS_BETWEEN and run.step - self._saved >= _PART_BETWEEN * run.total

    def save(self, tensors: Weights, model: ModelPart, run: RunPart) -> None:
        """Write the newest checkpoint.

        Raises OSError if the file cannot be written, and InputError if another process has written `last`.
        Either way the earlier checkpoints are intact.
        """
        try:
            self._check_turn()
            if self.files.is_file(NEWEST):
                self.files.also_called(NEWEST, f"step-{self._saved}{SUFFIX}")
            self._write(tensors, model, run)
            if run.best_step == run.step:
                self.files.also_called(NEWEST, BEST)
                self.files.sync()
        except OSError as error:
            why = f"{error.strerror}; the earlier checkpoints are intact"
            raise OSError(error.errno, why, str(self.files.path / NEWEST)) from error
        self._saved = run.step
        self._at = time.monotonic()
        newest_first = checkpoints_of(self.folder.path, broken_first=False)
        older = [file.name for file in newest_first if file.name.startswith("step-")]
        for name in older[self.keep - 1 :]:
            self.files.remove(name)

    def _write(self, tensors: Weights, model: ModelPart, run: RunPart) -> None:
        """Write `last`, the newest checkpoint."""
        run.save += 1
        run.saved_at = time.time()
        with self.files.write(NEWEST, "wb") as file:
            write(file, tensors, model, run)
        self._order_of_last = run.order

    def _check_turn(self) -> None:
        """Raise InputError if another process has written `last` since this one did."""
        order = self._order_of(NEWEST)
        if order not in (None, self._order_of_last):
            what = "was written by another process, which has resumed this run meanwhile"
            how = "this one stops, and nothing of the other is lost"
            raise InputError(f"{self.files.path / NEWEST} {what}: {how}")

    def _newest(self) -> Order | None:
        """Return the order of the newest checkpoint whose header can be read."""
        orders = (self._order_of(path.name) for path in checkpoints_of(self.folder.path, broken_first=False))
        return next((order for order in orders if order), None)

    def _set_last_aside(self) -> None:
        """Set `last` aside beside copies of its run's records, or remove its name if it is broken."""
        aside = self._set_aside(NEWEST)
        if aside is None:
            self.files.remove(NEWEST)
            return
        for record in RECORDS:
            if self.folder.top.is_file(record):
                self.folder.top.also_called(record, f"{aside.removesuffix(SUFFIX)}.{record}", self.files)

    def _set_aside(self, name: str) -> str | None:
        """Give `last` or `best` a second name, which has its step, and return it.

        Returns None for a broken file, whose second name ends in `.broken`.
        """
        try:
            run = read(self.files.path / name).run
        except InputError:
            self._keep_as(name, name, ".broken")
            return None
        step = run.step if run else 0
        return self._keep_as(name, f"{name.removesuffix(SUFFIX)}-step-{step}", SUFFIX)

    def _keep_as(self, name: str, stem: str, suffix: str) -> str:
        """Give a file a second name: STEM, or the first of STEM-2, STEM-3, ... that is free."""
        new = f"{stem}{suffix}"
        number = 1
        names = self.files.names()
        order = self._order_of(name)
        while new in names and (order is None or self._order_of(new) != order):
            number += 1
            new = f"{stem}-{number}{suffix}"
        if new not in names:
            self.files.also_called(name, new)
        return new

    def _is_here(self, path: Path) -> bool:
        return path.resolve().parent == self.files.path.resolve() and self.files.is_file(path.name)

    def _order_of(self, name: str) -> Order | None:
        """Return the order of a checkpoint; None if it is missing or broken."""
        try:
            return order_of(self.files.path / name)
        except LaterFormat:  # it must not be set aside as a broken one
            raise
        except InputError:
            return None


def gather(module: LanguageModel, optimizer: Optimizer | None = None) -> Weights:
    """Return the weights (or only the adapters) by their names in a GPT, and the optimizer's state."""
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


def load_optimizer(module: LanguageModel, optimizer: CombinedOptimizer, checkpoint: Checkpoint) -> None:
    """Restore the optimizer's state; its options keep their present values.

    Raises InputError if the state does not belong to these weights. A float16 run may have no state yet: no
    update is made until its loss scale is found.
    """
    saved = below("optimizer/", checkpoint.tensors)
    if not saved and checkpoint.run and checkpoint.run.scale:
        return
    names = {weight: name for name, weight in module.model.named_parameters()}
    expected: dict[str, tuple[Tensor, str]] = {}
    for part in optimizer.parts:
        for group in part.optimizer.param_groups:
            for weight in group["params"]:
                expected |= {f"{names[weight]}/{key}": (weight, key) for key in part.state}
    if wrong := sorted(expected.keys() ^ saved.keys()):
        what = "lacks" if wrong[0] in expected else "has"
        raise InputError(f"{checkpoint.path}: the optimizer's state {what} {wrong[0]}")
    for name, (weight, key) in expected.items():
        tensor = saved[name]
        shape = torch.Size([]) if key == "step" else weight.shape
        if tensor.shape != shape or not tensor.is_floating_point():
            what = f"has shape {tuple(tensor.shape)}, expected {tuple(shape)} in floating point"
            raise InputError(f"{checkpoint.path}: the optimizer's {name} {what}")
        optimizer.state[weight][key] = tensor.to(weight.device, copy=True)


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Return the states of this process's random generators by kind of device, for a checkpoint.

    Dropout and `sampled_cross_entropy` draw from these. Nothing else that a resumed run draws has a state:
    windows follow from the seed and the batch's number (`gpt/data/windows.py`), `bpe_dropout` from the seed
    and the window's number, samples of text from a fixed seed.
    """
    return {kind: generator.get_rng_state() for kind, generator in _generators(device).items()}


def set_random_state(state: dict[str, Tensor], seed: int, rank: int, device: torch.device) -> None:
    """Restore this process's random generators.

    In a new run the first process goes on with those that have drawn the initial weights. The others, and
    those that the saved run lacked, are seeded by their number.
    A device whose kind differs from the saved one keeps its own state.
    """
    if not state and rank > 0:
        torch.manual_seed(int(np.random.SeedSequence((seed, rank)).generate_state(1, np.uint64)[0]))
    for kind, generator in _generators(device).items():
        if kind in state:
            generator.set_rng_state(state[kind])


class _Generator(Protocol):
    """The random generator of a kind of device: `torch` for the CPU, `torch.cuda` and others."""

    def get_rng_state(self) -> Tensor: ...

    def set_rng_state(self, new_state: Tensor) -> None: ...


def _generators(device: torch.device) -> dict[str, _Generator]:
    """Return the modules that hold the generators of the CPU and the device, by kind of device."""
    # On a CPU the second entry replaces the first: `torch.cpu` has no generators.
    return {device.type: torch.get_device_module(device), "cpu": torch}


def below(prefix: str, tensors: Weights) -> Weights:
    """Return the tensors whose names begin with a prefix, named without it."""
    return {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
