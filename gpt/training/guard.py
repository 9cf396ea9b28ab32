"""Losses and gradients that are not finite: they never reach the weights."""

from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from gpt.errors import InputError


class Guard:
    """Stops the run between the backward pass and the update; float16's scaler checks gradients itself.

    Loss and gradients are reduced to one flag. Only reading it makes an update wait for the device and
    for other processes. So that they act together, they agree in the same moment on what any of them asks
    for: `received` is a signal sent to this process, `wants_save` its wish to save; after the update `agreed`
    and `agreed_save` are the same on all processes.
    """

    def __init__(self) -> None:
        self.received = 0
        self.agreed = 0
        self.wants_save = False
        self.agreed_save = 0

    def check(self, trainer: Trainer, loss: Tensor, norm: Tensor, step: int) -> None:
        """InputError unless update `step` may be made, by its last loss and its gradients' norm."""
        total = loss if scaler_of(trainer) else loss + norm  # infinity and NaN survive addition
        broken = (~total.isfinite()).int()
        asked = [torch.full_like(broken, number) for number in (self.received, self.wants_save)]
        flags: Any = torch.stack([broken, *asked])
        is_broken, self.agreed, self.agreed_save = read(trainer.strategy.reduce(flags, reduce_op="max"))
        if is_broken:
            what = f"loss {float(loss):g}, gradient norm {float(norm):g} at step {step}"
            how = "the last checkpoint is good; lower the learning rate"
            raise InputError(f"{what}: stopped before weights changed, {how}")


def scaler_of(trainer: Trainer) -> Any:
    """The loss scale of float16, if the run has one."""
    return getattr(trainer.precision_plugin, "scaler", None)


def read(flags: Tensor) -> list[int]:
    """Read the flags from the device, at once."""
    return flags.tolist()
