"""The largest micro-batch that fits into memory."""

from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from gpt.errors import InputError
from gpt.run.checkpoint import random_state, set_random_state


def fit_micro_batch(trainer: Trainer, module: Any) -> None:
    """Halve the micro-batch of `--data.tokens_per_update` before training until one fits.

    The trial is an update's first two batches, beside memory for the optimizer's two moments; it changes no
    weight and no random number of the run. It runs uncompiled, which needs more memory than what is compiled:
    compiling takes up to a minute and more for each size.
    """
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    device = trainer.strategy.root_device
    state = random_state(device)
    while not _fits(trainer, module, data.train_dataloader().dataset[0]):
        if data.batch_size == 1:
            raise InputError(
                f"one window of {data.context_length} tokens does not fit into the memory of {device}: "
                "give a smaller --model.config.context_length, or --model.checkpoint_activations true"
            )
        data.split_update(data.batch_size // 2)
    set_random_state(state, device)


def _fits(trainer: Trainer, module: Any, batch: tuple[Tensor, ...]) -> bool:
    device, fits = trainer.strategy.root_device, True
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    try:
        with trainer.precision_plugin.train_step_context():
            moments = [torch.empty(2, weight.numel(), device=device) for weight in module.parameters()]
            for _ in range(2):  # beside the second are the gradients of the first, as in an update
                module.loss(tuple(part.to(device) for part in batch)).backward()
            del moments
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        fits = False
    module.zero_grad()
    if device.type == "cuda":
        fits = fits and not _spilled(device)
        torch.cuda.empty_cache()
    return trainer.strategy.reduce_boolean_decision(fits)


def _spilled(device: torch.device) -> bool:
    """Whether a GPU reserved more than it has: on Windows its driver takes the system's memory then."""
    return torch.cuda.max_memory_reserved(device) >= torch.cuda.mem_get_info(device)[1]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a GPU or a CPU: on a CPU torch raises a plain RuntimeError."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    told = str(error).lower() if isinstance(error, RuntimeError) else ""
    return "alloc" in told or "out of memory" in told
