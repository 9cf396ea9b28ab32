"""From a path to a model and its tokenizer, whatever a run or an export left there."""

import os
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

import torch

from gpt.config import GPTConfig
from gpt.errors import InputError
from gpt.template import Template
from gpt.tokenizer import Tokenizer
from gpt.weights.checkpoint import RUNS, checkpoints_of, newest_run
from gpt.weights.hub import locate
from gpt.weights.pretrained import GPT
from gpt.weights.read import Found, crop, read_weights

Device = Literal["auto", "cpu", "cuda", "mps"]


def load_with_template(
    path: str | os.PathLike[str] | None = None, device: Device = "cpu"
) -> tuple[GPT, Tokenizer, Template | None]:
    """`load`, and the template of a run that was trained on examples."""
    found = _read_cropped(path)
    model = GPT.from_weights(found.config, found.weights).to(choose_device(device))
    return model, found.tokenizer, found.template


def load(path: str | os.PathLike[str] | None = None, device: Device = "cpu") -> tuple[GPT, Tokenizer]:
    """The model, in evaluation mode, and its tokenizer.

    `path` is a run folder (its best checkpoint is taken, else its newest), what `GPT.from_pretrained` reads,
    or None for the run under `runs/` that was started or resumed last. Rows that pad the vocabulary past the
    tokenizer's are left out, so no such id can ever be sampled.

    Raises:
        InputError: there is no model, it has fewer tokens than any tokenizer, or the device is missing.
    """
    return load_with_template(path, device)[:2]


def choose_device(name: Device = "auto") -> torch.device:
    """The device of that name; `auto` takes a CUDA GPU, else Apple's MPS, else the CPU, as `gpt fit` does.

    A device that this machine or this build of PyTorch lacks raises InputError.
    """
    found = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    usable = [device for device, available in found.items() if available]
    if name not in ("auto", *usable):
        raise InputError(f"there is no device {name} here, expected auto or one of {', '.join(usable)}")
    return torch.device(usable[0] if name == "auto" else name)


def start_from(path: str | os.PathLike[str], config: GPTConfig) -> GPT:
    """A model in training mode with the weights at `path`, and context length and dropout of `config`."""
    found = read_to_start_from(path, config)
    _read_initial.cache_clear()
    model = GPT(found.config)  # takes random numbers as a run from scratch does, so dropout's stay the same
    model.load_state_dict(GPT.from_weights(found.config, found.weights).state_dict())
    return model


def read_to_start_from(path: str | os.PathLike[str], config: GPTConfig) -> Found:
    """What `start_from` starts from; kept, so that it is read once."""
    return _read_initial(str(path), config.context_length, config.dropout)


def find(path: str | os.PathLike[str] | None = None) -> Path:
    """The checkpoint file, or the folder with weights, that `path` of `load` stands for, or InputError."""
    path = newest_run() if path is None else path
    if path is None:
        raise InputError(f"no checkpoint under {RUNS}/: train a model with 'gpt fit' or name --checkpoint")
    path = locate(path)
    if path.is_file() or (path / "config.json").is_file() or (path / "ckpt.pt").is_file():
        return path
    best = path / "checkpoints" / "best.ckpt"
    found = [best] if best.is_file() else checkpoints_of(path, broken_first=False)
    if not found:
        raise InputError(f"{path} holds neither checkpoints/best.ckpt nor another checkpoint nor config.json")
    return found[0]


def _read_cropped(path: str | os.PathLike[str] | None, context_length: int | None = None) -> Found:
    """Weights without the rows that pad a vocabulary past the tokenizer's."""
    found = read_weights(find(path))
    sizes = {"vocab_size": found.vocab_size, "context_length": context_length}
    config, weights = crop(found.config, found.weights, **sizes)
    return replace(found, config=config, weights=weights)


@lru_cache(maxsize=1)
def _read_initial(path: str, context_length: int, dropout: float) -> Found:
    found = _read_cropped(path, context_length)
    return replace(found, config=replace(found.config, dropout=dropout))
