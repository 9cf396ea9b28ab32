"""The device on which a command runs a model."""

from typing import Literal

import torch

from gpt.errors import InputError

Device = Literal["auto", "cpu", "cuda", "mps"]


def choose_device(name: str = "auto") -> torch.device:
    """The device of that name; `auto` takes a CUDA GPU, else Apple's MPS, else the CPU, as `gpt fit` does.

    Raises:
        InputError: this machine or this build of PyTorch lacks the device.
    """
    found = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    usable = [device for device, available in found.items() if available]
    if name not in ("auto", *usable):
        raise InputError(f"there is no device {name} here, expected auto or one of {', '.join(usable)}")
    return torch.device(usable[0] if name == "auto" else name)
