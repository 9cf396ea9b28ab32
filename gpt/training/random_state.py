"""The random generators of a process, as plain values and tensors."""

import random
from typing import Any

import numpy as np
import torch


def random_state(device: torch.device) -> dict[str, Any]:
    """The state of the generators of Python, numpy, torch and the device."""
    version, words, gauss = random.getstate()
    numpy = np.random.get_state(legacy=False)
    state: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": {**numpy, "state": {**numpy["state"], "key": numpy["state"]["key"].tolist()}},
        "torch": torch.get_rng_state(),
    }
    if device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state()
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """The inverse of `random_state`; a device of another kind than the saved one keeps its own state."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    key = np.array(state["numpy"]["state"]["key"], np.uint32)
    np.random.set_state({**state["numpy"], "state": {**state["numpy"]["state"], "key": key}})
    torch.set_rng_state(state["torch"])
    if device.type in state:
        torch.get_device_module(device).set_rng_state(state[device.type])
