"""From a path to a model and its tokenizer, and from a model to a folder; `from gpt import GPT`."""

import os
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

import torch

from gpt import model
from gpt.config import GPTConfig
from gpt.errors import InputError
from gpt.files import atomic_write, write_json
from gpt.template import Template
from gpt.tokenizer import Tokenizer
from gpt.weights.checkpoint import RUNS, checkpoints_of, newest_run
from gpt.weights.formats.table import Weights, check_complete
from gpt.weights.read import Found, crop, locate, read_weights

Device = Literal["auto", "cpu", "cuda", "mps"]
_MASK_BYTES = 1 << 28  # of a context of 16,384 tokens


class GPT(model.GPT):
    """`gpt.model.GPT` that can read its weights from any known format and write them to a folder."""

    def save_pretrained(self, path: str | os.PathLike[str]) -> None:
        """Write `model.safetensors` and `config.json` into the folder `path`, a tied head once."""
        from safetensors.torch import save

        state = self.state_dict()
        if self.config.tie_embeddings:
            del state["head.weight"]  # safetensors refuses to write a shared tensor twice
        weights = {name: tensor.contiguous() for name, tensor in state.items()}
        with atomic_write(Path(path) / "model.safetensors", "wb") as file:
            file.write(save(weights, metadata={"format": "pt"}))
        write_json(Path(path) / "config.json", {"model_type": "minimal-gpt", **self.config.to_dict()})

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike[str]) -> "GPT":
        """Read weights in any known format; the model is on the CPU, in evaluation mode.

        `path` is a folder written by `save_pretrained`; a checkpoint of `gpt fit`; GPT-2's weights in a
        Hugging Face folder or by hub name (`gpt2`, `hub:OWNER/NAME`); a nanoGPT checkpoint; a state dict of
        the book's GPTModel. Anything else, or a weight that is missing or of another shape, is an InputError.
        """
        found = read_weights(path)
        return cls.from_weights(found.config, found.weights)

    @classmethod
    def from_weights(cls, config: GPTConfig, weights: Weights) -> "GPT":
        """A GPT in evaluation mode with these weights by state-dict name; a tied head may be left out.

        A weight that is missing, unknown, or of another shape raises InputError with its name.
        """
        weights = check_complete(config, weights)
        if config.context_length**2 > max(_MASK_BYTES, sum(tensor.nbytes for tensor in weights.values())):
            raise InputError(f"context_length {config.context_length} needs a mask larger than the weights")
        with torch.device("meta"):  # no memory, no random numbers
            model = cls(config)
        try:
            copies = {name: tensor.to(torch.float32, copy=True) for name, tensor in weights.items()}
            model.load_state_dict({"head.weight": copies["token_embedding.weight"], **copies}, assign=True)
        except RuntimeError as error:
            raise InputError(f"the model does not fit into memory: {error}") from None
        model._share(config.tie_embeddings)
        return model.eval()


def load_with_template(
    path: str | os.PathLike[str] | None = None, device: Device = "cpu"
) -> tuple[GPT, Tokenizer, Template | None]:
    """`load`, and the template of a run that was trained on examples."""
    found = read_cropped(path)
    model = GPT.from_weights(found.config, found.weights).to(choose_device(device))
    return model, found.tokenizer, found.template


def load(path: str | os.PathLike[str] | None = None, device: Device = "cpu") -> tuple[GPT, Tokenizer]:
    """The model, in evaluation mode, and its tokenizer.

    `path` is a run folder (its best checkpoint is taken, else its newest), what `GPT.from_pretrained` reads,
    or None for the run under `runs/` that was started or resumed last. Rows that pad the vocabulary past the
    tokenizer's are left out, so no such id can ever be sampled. Where there is no model, one with fewer
    tokens than any tokenizer, or no such device: InputError.
    """
    return load_with_template(path, device)[:2]


def start_from(path: str | os.PathLike[str], config: GPTConfig) -> GPT:
    """A model in training mode with the weights at `path`, and context length and dropout of `config`."""
    found = read_once(str(path), config.context_length)
    read_once.cache_clear()
    # A new model takes random numbers as a run from scratch does, so dropout's stay the same.
    model = GPT(replace(found.config, dropout=config.dropout))
    model.load_state_dict(GPT.from_weights(found.config, found.weights).state_dict())
    return model


def read_cropped(path: str | os.PathLike[str] | None, context_length: int | None = None) -> Found:
    """What `load` and `start_from` read, without the rows that pad a vocabulary past the tokenizer's."""
    found = read_weights(find(path))
    sizes = {"vocab_size": found.vocab_size, "context_length": context_length}
    config, weights = crop(found.config, found.weights, **sizes)
    return replace(found, config=config, weights=weights)


read_once = lru_cache(maxsize=1)(read_cropped)  # a run needs the vocabulary before it needs the model


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


def choose_device(name: Device = "auto") -> torch.device:
    """The device of that name; `auto` takes a CUDA GPU, else Apple's MPS, else the CPU, as `gpt fit` does.

    A device that this machine or this build of PyTorch lacks raises InputError.
    """
    found = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    usable = [device for device, available in found.items() if available]
    if name not in ("auto", *usable):
        raise InputError(f"there is no device {name} here, expected auto or one of {', '.join(usable)}")
    return torch.device(usable[0] if name == "auto" else name)
