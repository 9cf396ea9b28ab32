"""Keep losses and gradients that are not finite away from the weights."""

from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from gpt.errors import InputError


class Guard:
    """Stops a run before an update whose loss or gradients are not finite.

    Loss and gradients are reduced to one flag. Only reading it makes an update wait for the device and for
    other processes. In the same moment the processes agree on what any of them asks for: `received` is a
    signal sent to this process, `wants_save` its request to save. After the update `agreed` and `agreed_save`
    are the same on all processes. Float16's loss scaler checks the gradients itself.
    """

    def __init__(self) -> None:
        self.received = 0
        self.agreed = 0
        self.wants_save = False
        self.agreed_save = 0

    def check(self, trainer: Trainer, loss: Tensor, norm: Tensor, step: int) -> None:
        """Raise InputError if the loss or the gradients' norm of update `step` is not finite."""
        total = loss if scaler_of(trainer) else loss + norm  # the sum is not finite if either is not
        broken = (~total.isfinite()).int()
        asked = [torch.full_like(broken, number) for number in (self.received, self.wants_save)]
        flags: Any = torch.stack([broken, *asked])
        is_broken, self.agreed, self.agreed_save = read(trainer.strategy.reduce(flags, reduce_op="max"))
        if is_broken:
            what = f"loss {float(loss):g}, gradient norm {float(norm):g} at step {step}"
            how = "the last checkpoint is good; lower the learning rate"
            raise InputError(f"{what}: stopped before weights changed, {how}")


def scaler_of(trainer: Trainer) -> Any:
    """Return float16's loss scaler; None if the run has none."""
    return getattr(trainer.precision_plugin, "scaler", None)


def read(flags: Tensor) -> list[int]:
    """Read the flags from the device, all in one transfer."""
    return flags.tolist()
