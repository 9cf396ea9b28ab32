"""`from gpt import GPT`: the model, with its weights read from and written to disk."""

import os
from pathlib import Path

import torch

from gpt import model
from gpt.config import GPTConfig
from gpt.errors import InputError
from gpt.files import atomic_write, write_json
from gpt.weights.formats.table import Weights, check_complete
from gpt.weights.read import read_weights

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
        the book's GPTModel.

        Raises:
            InputError: there is none of these, or a weight is missing or of another shape.
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
