"""A machine whose speed is in the cache, so that plans need not measure it."""

import json
from pathlib import Path

import torch

from gpt.plan.rule import timed_shape
from gpt.training.speed import SPEEDS, USUAL_SHAPE, speed_key


def know_speed(cache: Path, speed: float) -> None:
    """Write to the cache folder that this machine's CPU has this speed in float32 on each shape."""
    seconds = (2.0**power for power in range(-6, 20))  # up to six days
    shapes = {USUAL_SHAPE, *map(timed_shape, seconds)}
    speeds = {speed_key(torch.device("cpu"), "32-true", shape): speed for shape in shapes}
    cache.mkdir(exist_ok=True)
    (cache / SPEEDS).write_text(json.dumps(speeds), "utf-8")
