"""Losses and gradients that are not finite: they never reach the weights."""

from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from gpt.errors import InputError, check_least
from gpt.training.output import report


class Guard:
    """Stops the run, or skips at most `limit` updates, between the backward pass and the update.

    All losses and gradients are reduced to one flag. Only reading it makes an update wait for the device and
    for other processes, so they agree on a signal in the same moment: `received` is the one sent to this
    process, `agreed` one that any of them has received.
    """

    def __init__(self, limit: int = 0) -> None:
        check_least(0, skip_nonfinite=limit)
        self.limit = limit
        self.skipped = self.received = self.agreed = 0
        self._losses: Tensor | float = 0.0

    def add(self, loss: Tensor) -> None:
        """Include a batch's loss."""
        self._losses = self._losses + loss

    def passes(self, trainer: Trainer, norm: Tensor) -> bool:
        """Whether to make the update, by the gradients' norm; InputError where no more may be skipped."""
        losses, self._losses = torch.as_tensor(self._losses, device=norm.device), 0.0
        scaled = getattr(trainer.precision_plugin, "scaler", None)  # it checks the gradients itself
        total = losses if scaled else losses + norm  # infinity and NaN survive addition
        signal = torch.full_like(total, self.received, dtype=torch.int32)
        flags: Any = torch.stack([~total.isfinite(), signal])
        if trainer.world_size > 1:
            flags = trainer.strategy.reduce(flags, reduce_op="max")
        broken, self.agreed = read(flags)
        if not broken:
            return True
        step, last = trainer.global_step + 1, trainer.fit_loop.total_batch_idx + 1
        first = last - (last - 1) % trainer.accumulate_grad_batches
        batches = f"batch {last}" if first == last else f"batches {first} to {last}"
        what = f"loss {float(losses):g}, gradient norm {float(norm):g} at step {step}, {batches} of the run"
        if self.skipped == self.limit:
            how = "lower the learning rate, or skip such steps with --model.skip_nonfinite N"
            raise InputError(f"{what}: stopped before weights changed, the last checkpoint is good; {how}")
        self.skipped += 1
        report(f"{what}: skipped, {self.skipped} of {self.limit}")
        return False


def read(flags: Tensor) -> list[int]:
    """Read the flags from the device, at once."""
    return flags.tolist()
