"""Low-rank adapters (LoRA, Hu et al. 2021): checkpoints hold them alone, the run's folder the base once."""

from dataclasses import dataclass
from pathlib import Path

from gpt.config import GPTConfig
from gpt.errors import InputError
from gpt.files import StrPath, file_sha256
from gpt.weights.formats.table import Weights, check_complete
from gpt.weights.tensors import read_tensors

LAYERS = ("W_query", "W_key", "W_value", "out_proj", "up", "down")  # of a block: they get adapters
_A, _B = ".lora_A.default.weight", ".lora_B.default.weight"  # as peft names them


@dataclass(frozen=True, kw_only=True)
class AdapterPart:
    """What a checkpoint says of its adapters."""

    rank: int
    scale: float
    """Of their output."""
    base: str
    """The SHA-256 of the base's weights."""


def adapters_of(state: Weights) -> Weights:
    """The adapters in a state dict."""
    return {name: tensor for name, tensor in state.items() if name.endswith((_A, _B))}


def without_adapters(state: Weights) -> Weights:
    """The base in the state dict of a model with adapters."""
    adapters = adapters_of(state)
    return {name.replace(".base_layer.", "."): t for name, t in state.items() if name not in adapters}


def base_folder(checkpoint: StrPath) -> Path:
    """The folder of the base: `base` beside `checkpoints`."""
    return Path(checkpoint).resolve().parent.parent / "base"


def with_base(checkpoint: StrPath, config: GPTConfig, part: AdapterPart | None, state: Weights) -> Weights:
    """The weights of a checkpoint: `state`, or the base with the adapters in `state` if it is that base."""
    if not part:
        return state
    folder = base_folder(checkpoint)
    file = folder / "model.safetensors"
    if not file.is_file():
        raise InputError(f"it holds adapters alone, and the weights that they change are missing: {folder}")
    base = check_complete(config, read_tensors(folder))  # before a file of any size is hashed
    if file_sha256(file) != part.base:
        raise InputError(f"its adapters were trained with other weights than those in {folder}")
    if any(tensor.shape[:1] != (part.rank,) for name, tensor in state.items() if name.endswith(_A)):
        raise InputError(f"it has adapters that are not of rank {part.rank}")
    return merge(base, state, part.scale)


def merge(base: Weights, adapters: Weights, scale: float) -> Weights:
    """`base` with W + scale * B A for each adapted W (out, in), where B is (out, rank) and A (rank, in)."""
    merged, left = dict(base), dict(adapters)
    for name in filter(lambda name: name.endswith(_A), adapters):
        place = name.replace(_A, ".weight")
        a, b, weight = left.pop(name), left.pop(name.replace(_A, _B), None), base.get(place)
        if weight is None or b is None:
            raise InputError(f"{name} has no counterpart {_B}, or no weight in the base")
        if a.dim() != 2 or b.shape != (weight.shape[0], a.shape[0]) or weight.shape[1:] != a.shape[1:]:
            raise InputError(f"{name} of shape {tuple(a.shape)} does not fit {tuple(weight.shape)}")
        merged[place] = weight + scale * (b.float() @ a.float()).to(weight.dtype)
    if left:
        raise InputError(f"{next(iter(left))} is no adapter of a weight in the base")
    return merged
