"""Convert GPT-2 weights between programs with a table, one row for each layer, in both directions."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gpt.config import GPTConfig
from gpt.errors import InputError
from gpt.model import GPT

Weights = dict[str, Tensor]
Shape = tuple[int, ...]
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Row:
    """One layer of the other program and its counterpart here; `{}` in a name is the block number."""

    theirs: str  # the layer's name in the other program
    ours: tuple[str, ...]  # its name here; tensors of several layers are concatenated along their first axis
    transposed: bool = False  # whether theirs is stored as (in, out); `torch.nn.Linear` stores (out, in)
    parameters: tuple[str, str] = ("weight", "bias")  # what the other program calls them


class _Unfilled(TorchFunctionMode):
    """Skips initialisers on the meta device, which would load the compiler: a second for nothing."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.triu:
            return args[0]
        is_init = getattr(function, "__module__", None) == "torch.nn.init"
        return kwargs["tensor"] if is_init else function(*args, **(kwargs or {}))


@contextmanager
def on_meta() -> Iterator[None]:
    """New modules take no memory and no random numbers."""
    with torch.device("meta"), _Unfilled():
        yield


def shapes(config: GPTConfig) -> dict[str, Shape]:
    """The shape of each tensor in a GPT's state dict, blocks once as `blocks.{}`; without a tied head."""
    try:
        with on_meta():
            state = GPT(replace(config, num_layers=1)).state_dict()
    except RuntimeError as error:
        raise InputError(f"the model's sizes are too large: {error}") from None
    if config.tie_embeddings:
        del state["head.weight"]
    return {name.replace("blocks.0.", "blocks.{}."): tuple(tensor.shape) for name, tensor in state.items()}


def to_gpt(
    config: GPTConfig, state: Weights, rows: Iterable[Row], skipped: str, *, zero_biases: bool = False
) -> Weights:
    """Convert another program's state dict to a GPT's; the tensors are views of the given ones.

    `skipped` is a regular expression for names without weights. With `zero_biases`, missing biases are zeros.
    Any other tensor that is missing, unknown, or of another shape or type raises InputError with its name.
    """
    weights: Weights = {}
    left = dict(state)
    for name, ours, shape, transposed in _tensors(config, rows):
        if name not in left and not (zero_biases and name.endswith(".bias")):
            raise InputError(f"the weights lack {name} of shape {shape}")
        tensor = left.pop(name) if name in left else torch.zeros(shape)
        if tuple(tensor.shape) != shape:
            raise InputError(f"{name} has shape {tuple(tensor.shape)}, expected {shape}")
        if tensor.dtype not in _DTYPES:
            raise InputError(f"{name} is of type {tensor.dtype}, expected a floating-point type")
        weights.update(zip(ours, (tensor.T if transposed else tensor).chunk(len(ours)), strict=True))
    storages = [tensor.untyped_storage() for tensor in weights.values()]
    stored = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    if sum(tensor.nbytes for tensor in weights.values()) > stored:
        raise InputError("several weights are stored in the same place")  # a small file of a large model
    if unknown := sorted(name for name in left if not re.fullmatch(skipped, name)):
        shape = tuple(left[unknown[0]].shape)
        raise InputError(f"the weights hold {unknown[0]} of shape {shape}, which GPT-2 does not have")
    return weights


def from_gpt(config: GPTConfig, weights: Weights, rows: Iterable[Row]) -> Weights:
    """Convert a GPT's state dict to another program's; biases that only `config` has are zeros."""
    state: Weights = {}
    for name, ours, shape, transposed in _tensors(config, rows):
        if ours[0] in weights:
            tensor = torch.cat([weights[name] for name in ours])
            state[name] = (tensor.T if transposed else tensor).contiguous()
        else:
            state[name] = torch.zeros(shape)
    return state


def check_complete(config: GPTConfig, weights: Weights) -> Weights:
    """The state dict of this project's own GPT, without the head if that is tied; errors as `to_gpt`."""
    layers = dict.fromkeys(name.rpartition(".")[0] for name in shapes(config))
    return to_gpt(config, weights, [Row(layer, (layer,)) for layer in layers], "head.weight")


def _tensors(config: GPTConfig, rows: Iterable[Row]) -> Iterator[tuple[str, list[str], Shape, bool]]:
    """Each tensor of the other program: its name, ours, its shape, and whether it is transposed."""
    expected = shapes(config)
    for row in rows:
        for theirs, suffix in zip(row.parameters, ("weight", "bias"), strict=True):
            if f"{row.ours[0]}.{suffix}" not in expected:
                continue
            first, *others = expected[f"{row.ours[0]}.{suffix}"]
            transposed = row.transposed and suffix == "weight"
            shape = (len(row.ours) * first, *others)[:: -1 if transposed else 1]
            for block in range(config.num_layers if "{}" in row.theirs else 1):  # lazy, may be billions
                names = [f"{ours.format(block)}.{suffix}" for ours in row.ours]
                yield f"{row.theirs.format(block)}.{theirs}", names, shape, transposed
