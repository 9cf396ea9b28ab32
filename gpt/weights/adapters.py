"""Low-rank adapters (LoRA, Hu et al. 2021). Checkpoints hold only them; the run's folder holds the base."""

from dataclasses import dataclass
from pathlib import Path

from gpt.config import GPTConfig
from gpt.errors import InputError
from gpt.files import StrPath, file_sha256
from gpt.weights.formats.table import Weights, check_complete
from gpt.weights.tensors import read_tensors

BASE = "base"
"""The folder in a run's of the weights that adapters change."""
LAYERS = ("W_query", "W_key", "W_value", "out_proj", "up", "down")  # the layers of a block with adapters
# peft's names of an adapter's matrices.
_A = ".lora_A.default.weight"
_B = ".lora_B.default.weight"


@dataclass(frozen=True, kw_only=True)
class AdapterPart:
    """The metadata of a checkpoint's adapters."""

    rank: int
    scale: float
    """Factor of the adapters' output."""
    base: str
    """SHA-256 of the base's weights."""


def adapters_of(state: Weights) -> Weights:
    """Return only the adapters in a state dict."""
    return {name: tensor for name, tensor in state.items() if name.endswith((_A, _B))}


def without_adapters(state: Weights) -> Weights:
    """Return only the base's weights in the state dict of a model with adapters."""
    adapters = adapters_of(state)
    base = {name: tensor for name, tensor in state.items() if name not in adapters}
    return {name.replace(".base_layer.", "."): tensor for name, tensor in base.items()}


def base_folder(checkpoint: StrPath) -> Path:
    """Return the folder of the base: `base` beside `checkpoints`."""
    return Path(checkpoint).resolve().parent.parent / BASE


def with_base(checkpoint: StrPath, config: GPTConfig, part: AdapterPart, adapters: Weights) -> Weights:
    """Return the weights of a checkpoint: its adapters merged with the base that they were trained on."""
    folder = base_folder(checkpoint)
    file = folder / "model.safetensors"
    if not file.is_file():
        raise InputError(f"it holds only adapters, and the weights that they change are missing: {folder}")
    base = check_complete(config, read_tensors(folder))  # bounds the size that is hashed
    if file_sha256(file) != part.base:
        raise InputError(f"its adapters were trained with other weights than those in {folder}")
    return merge(base, adapters, part)


def merge(base: Weights, adapters: Weights, part: AdapterPart) -> Weights:
    """Return `base` with W + scale * B A for each adapted W (out, in); B is (out, rank), A is (rank, in)."""
    merged = dict(base)
    places = {name.removesuffix(_A).removesuffix(_B) for name in adapters}
    for place in places:
        try:
            a = adapters[place + _A]
            b = adapters[place + _B]
            weight = base[f"{place}.weight"]
        except KeyError as error:
            raise InputError(f"its adapters, or the weights that they change, lack {error}") from None
        fits = weight.dim() == 2 and b.shape == (weight.shape[0], part.rank)
        if not fits or a.shape != (part.rank, weight.shape[1]):
            raise InputError(f"its adapters of {place} are not of rank {part.rank}, or of another shape")
        merged[f"{place}.weight"] = weight + part.scale * (b.float() @ a.float()).to(weight.dtype)
    return merged
