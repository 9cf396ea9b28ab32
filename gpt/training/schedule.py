"""The learning rate as a function of the step."""

import math
from typing import Literal

Schedule = Literal["linear", "cosine", "constant"]


def learning_rate_factor(
    step: int,
    total_steps: int,
    warmup_steps: int = 0,
    schedule: Schedule = "cosine",
    final: float = 0.0,
) -> float:
    """Return the factor of the peak learning rate at `step`: for the update that follows `step` updates.

    The peaks are `lr` and `rest_lr` of `OptimizerConfig`. torch's `LambdaLR` multiplies them by it after each
    update, and `LanguageModel.set_total_steps` if the total changes. `total_steps` is the number of updates
    of the whole run, which `Limits` decides, or without `gpt fit` the Trainer.

    It rises linearly over `warmup_steps`; at step 0 it is already above 0. Then it falls to `final` at
    `total_steps`, linearly or along half a cosine (Loshchilov and Hutter 2017), and stays there.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    progress = min(1.0, max(0.0, (step - warmup_steps) / max(1, total_steps - warmup_steps)))
    remaining = 0.5 * (1 + math.cos(math.pi * progress)) if schedule == "cosine" else 1 - progress
    return final + (1 - final) * remaining
