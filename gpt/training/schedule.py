"""The learning rate as a pure function of the step."""

import math
from typing import Literal

Schedule = Literal["linear", "cosine", "wsd", "constant"]


def learning_rate_factor(
    step: int,
    total_steps: int,
    warmup_steps: int = 0,
    schedule: Schedule = "cosine",
    final: float = 0.0,
    decay_fraction: float = 0.2,
) -> float:
    """What the peak learning rate is multiplied with at `step`, counted from 0.

    It climbs linearly over `warmup_steps`, so that step 0 already moves, then falls to `final` at
    `total_steps` and stays there: along a line, along half a cosine (Loshchilov and Hutter 2017), or, for
    "wsd" (warm-up, stable, decay; Hu et al. 2024, section 4), along a line over the last `decay_fraction`.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    stable = round(total_steps * (1 - decay_fraction)) if schedule == "wsd" else 0
    decay_start = max(warmup_steps, stable)
    progress = min(1.0, max(0.0, (step - decay_start) / max(1, total_steps - decay_start)))
    remaining = 0.5 * (1 + math.cos(math.pi * progress)) if schedule == "cosine" else 1 - progress
    return final + (1 - final) * remaining
