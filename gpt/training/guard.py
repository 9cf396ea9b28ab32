"""Keep losses and gradients that are not finite away from the weights, and such weights from checkpoints."""

from dataclasses import astuple, dataclass

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from gpt.errors import DivergedError

_HOW = "lower the learning rate, and begin again or with an earlier checkpoint"


@dataclass
class Requests:
    """The requests of a process to all processes, for after the present update; 0 for nothing."""

    signal: int = 0
    """Stop, because of the signal with this number."""
    save: int = 0
    """1: save a checkpoint."""


class Guard:
    """A check before each update, which stops a run whose loss or gradients are not finite.

    Loss and gradients are reduced to one flag. Only reading it makes an update wait for the device and for
    other processes. In the same moment the processes agree on requests: `asked` holds those of this process,
    and whoever has one writes it there. From then until the next update `agreed` holds, on all processes
    alike, what any of them has asked for. Float16's loss scaler checks the gradients itself.
    """

    def __init__(self) -> None:
        self.asked = Requests()
        self.agreed = Requests()

    def check(self, trainer: Trainer, loss: Tensor, norm: Tensor, step: int) -> None:
        """Let the processes agree on requests; then raise DivergedError if update `step` is not finite.

        `loss` is that of the update's last batch. Those of earlier ones show in the gradients' `norm`.
        """
        total = loss if scaler_of(trainer) else loss + norm  # the sum is not finite if either is not
        is_broken = (~total.isfinite()).int()
        asked = [torch.full_like(is_broken, number) for number in astuple(self.asked)]
        flags = torch.stack([is_broken, *asked])
        reduced = trainer.strategy.reduce(flags, reduce_op="max")
        assert isinstance(reduced, Tensor)
        any_broken, *agreed = read(reduced)
        self.agreed = Requests(*agreed)
        if any_broken:
            what = f"loss {float(loss):g}, gradient norm {float(norm):g} at step {step}"
            raise DivergedError(f"{what}: stopped before weights changed; {_HOW}")


def check_finite(module: torch.nn.Module, step: int) -> None:
    """Raise DivergedError, before they are saved, if the weights after update `step` are not finite."""
    weights = [weight.detach() for weight in module.parameters()]
    if not bool(torch.stack([weight.isfinite().all() for weight in weights]).all()):
        raise DivergedError(f"weights after step {step} are not finite: they are not saved; {_HOW}")


def scaler_of(trainer: Trainer) -> GradScaler | None:
    """Return float16's loss scaler; None if the run has none."""
    scaler: GradScaler | None = getattr(trainer.precision_plugin, "scaler", None)
    return scaler


def read(flags: Tensor) -> list[int]:
    """Read the flags from the device, all in one transfer."""
    numbers: list[int] = flags.tolist()
    return numbers
