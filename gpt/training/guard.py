"""Numbers going wrong: a loss or gradient that is not finite never reaches the weights."""

import sys
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from gpt.errors import InputError


class Guard:
    """Asked between the backward pass and the update, stops the run or leaves the step out.

    The answer is one number that all losses and gradients went into, read once a step. That waits for the
    device, which has the whole update still to be sent; the losses of accumulated batches stay on it.

    Args:
        limit: steps that may be left out in a run; 0 stops at the first.
    """

    def __init__(self, limit: int = 0) -> None:
        if limit < 0:
            raise InputError(f"skip_nonfinite must be at least 0, got {limit}")
        self.limit = limit
        self.skipped = 0
        self._losses: Tensor | None = None

    def add(self, loss: Tensor) -> None:
        """Take note of a batch's loss."""
        self._losses = loss if self._losses is None else self._losses + loss

    def passes(self, trainer: Trainer, norm: Tensor) -> bool:
        """Whether the update may be made, the same on all processes.

        Args:
            trainer: knows which step this is.
            norm: of all gradients; a gradient scaler looks after them itself, and lowers its scale.

        Raises:
            InputError: it may not, and the limit is reached.
        """
        losses, self._losses = self._losses if self._losses is not None else torch.zeros_like(norm), None
        scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
        total: Any = losses if scaled else losses + norm  # infinity and NaN survive addition
        if trainer.world_size > 1:
            total = trainer.strategy.reduce(total, reduce_op="sum")
        if torch.isfinite(total):
            return True
        step, last = trainer.global_step + 1, trainer.fit_loop.total_batch_idx + 1
        first = last - (last - 1) % trainer.accumulate_grad_batches
        batches = f"batch {last}" if first == last else f"batches {first} to {last}"
        what = f"loss {float(losses):g}, gradient norm {float(norm):g} at step {step}, {batches} of the run"
        if self.skipped == self.limit:
            raise InputError(
                f"{what}: stopped, the weights were not touched and the last checkpoint is good; lower the "
                "learning rate, or leave such steps out with --model.skip_nonfinite N"
            )
        self.skipped += 1
        _tell(f"{what}: left out, {self.skipped} of {self.limit}")
        return False


@rank_zero_only
def _tell(line: str) -> None:
    print(f"gpt fit: {line}", file=sys.stderr)
