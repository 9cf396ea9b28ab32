"""Convert GPT-2 weights between programs with a table of the tensors' names, in both directions."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gpt.config import GPTConfig
from gpt.errors import InputError
from gpt.model import GPT

Weights = dict[str, Tensor]
Shape = tuple[int, ...]
Names = Mapping[str, str]
"""Maps each tensor's name in the other program to ours; `{}` is the block's number. One of theirs can be
several of ours, concatenated along the first axis: the names are then separated by blanks."""


class _Unfilled(TorchFunctionMode):
    """Skips initialisers on the meta device, where they only load the compiler, which takes two seconds."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.triu:
            return args[0]
        is_init = getattr(function, "__module__", None) == "torch.nn.init"
        return kwargs["tensor"] if is_init else function(*args, **(kwargs or {}))


@contextmanager
def on_meta() -> Iterator[None]:
    """Build modules without using memory or random numbers."""
    with torch.device("meta"), _Unfilled():
        yield


def shapes(config: GPTConfig) -> dict[str, Shape]:
    """Return the shapes of a GPT's tensors, without a tied head; `blocks.{}` stands for every block."""
    with on_meta():
        state = GPT(replace(config, num_layers=1)).state_dict()
    if config.tie_embeddings:
        del state["head.weight"]
    return {name.replace("blocks.0.", "blocks.{}."): tuple(tensor.shape) for name, tensor in state.items()}


def to_gpt(
    config: GPTConfig,
    state: Weights,
    names: Names,
    skipped: str,
    *,
    transposed: str = "",
    zero_biases: bool = False,
) -> Weights:
    """Convert another program's state dict to a GPT's; the tensors are views of the given ones.

    `skipped` and `transposed` are regular expressions: for tensors to ignore, and for matrices stored as
    (in, out); `torch.nn.Linear` stores (out, in). With `zero_biases`, missing biases are zeros. Any other
    tensor that is missing, unknown, or of another shape or type raises InputError with its name.
    """
    weights: Weights = {}
    left = dict(state)
    for name, ours, shape, turned in _tensors(config, names, transposed):
        if zero_biases and name.endswith(".bias"):
            left.setdefault(name, torch.zeros(shape))
        if name not in left:
            raise InputError(f"the weights lack {name} of shape {shape}")
        tensor = left.pop(name)
        if tuple(tensor.shape) != shape or not tensor.is_floating_point():
            raise InputError(f"{name} has shape {tuple(tensor.shape)}, expected {shape} in floating point")
        weights.update(zip(ours, (tensor.T if turned else tensor).chunk(len(ours)), strict=True))
    if unknown := sorted(name for name in left if not re.fullmatch(skipped, name)):
        shape = tuple(left[unknown[0]].shape)
        raise InputError(f"the weights hold {unknown[0]} of shape {shape}, which GPT-2 does not have")
    return weights


def from_gpt(config: GPTConfig, weights: Weights, names: Names, transposed: str = "") -> Weights:
    """The inverse of `to_gpt`; a combined bias of query, key and value is zeros where the GPT has none.

    Raises the errors of `check_known`.
    """
    check_known(config, weights, names)
    state: Weights = {}
    for name, ours, shape, turned in _tensors(replace(config, qkv_bias=True), names, transposed):
        if ours[0] in weights:
            tensor = torch.cat([weights[name] for name in ours])
            state[name] = (tensor.T if turned else tensor).contiguous()
        elif len(ours) > 1:
            state[name] = torch.zeros(shape)
    return state


def check_known(config: GPTConfig, weights: Weights, names: Names) -> None:
    """Raise InputError for a tensor that the other program lacks, or that it needs and the GPT lacks."""
    ours = [name for together in names.values() for name in together.split()]
    blocks = range(config.num_layers)
    known = {name.format(block) for name in ours for block in (blocks if "{}" in name else (0,))}
    optional = {"head.weight"} if config.tie_embeddings else set()
    if not config.qkv_bias:
        optional |= {name for name in known if re.fullmatch(r".*\.W_\w+\.bias", name)}
    for name in sorted(weights.keys() - known):
        shape = tuple(weights[name].shape)
        raise InputError(f"the edited gpt/ has a tensor {name} of shape {shape}, which GPT-2 does not have")
    for name in sorted(known - optional - weights.keys()):
        raise InputError(f"the edited gpt/ has no tensor {name}, which GPT-2 has")


def check_complete(config: GPTConfig, weights: Weights) -> Weights:
    """Check this project's own state dict, drop a tied head; raises the errors of `to_gpt`."""
    return to_gpt(config, weights, {name: name for name in shapes(config)}, "head.weight")


def _tensors(
    config: GPTConfig, names: Names, transposed: str
) -> Iterator[tuple[str, list[str], Shape, bool]]:
    """Yield for each tensor of the other program: its name, ours, its shape, whether it is transposed."""
    expected = shapes(config)
    for theirs, together in names.items():
        ours = together.split()
        if ours[0] not in expected:
            continue
        first, *others = expected[ours[0]]
        shape = (len(ours) * first, *others)
        for block in range(config.num_layers if "{}" in theirs else 1):  # lazy, may be billions
            name = theirs.format(block)
            turned = bool(re.fullmatch(transposed, name))
            yield name, [one.format(block) for one in ours], shape[::-1] if turned else shape, turned
