"""Round matrices to int8 or int4, for decoding on a CPU and to measure what that costs.

In int8 a row has one scale. In int4 each `GROUP` neighbours of a row also have a step of their own, which is
a whole number of the row's scales: 4.25 bits a weight.

Shapes: O out_features, I in_features.
"""

import copy
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from gpt.errors import InputError
from gpt.model import GPT

WeightPrecision = Literal["float32", "bfloat16", "int8", "int4"]
Rounding = Literal["int8", "int4"]

GROUP = 32  # `GROUP` in step.cpp


class Int8(NamedTuple):
    """A matrix in int8."""

    levels: Tensor  # (O, I) int8, from -127 to 127
    scale: Tensor  # (O,) float32

    def values(self) -> Tensor:
        """Return the numbers (O, I) in float32."""
        return self.levels * self.scale[:, None]


class Int4(NamedTuple):
    """A matrix in int4."""

    levels: Tensor  # (O, I) int8, from -8 to 7
    steps: Tensor  # (O, I / GROUP) int8, of each group, in units of the row's scale
    scale: Tensor  # (O,) float32

    def values(self) -> Tensor:
        """Return the numbers (O, I) in float32."""
        return self.levels * (self.steps * self.scale[:, None]).repeat_interleave(GROUP, dim=1)


def to_int8(weight: Tensor) -> Int8:
    """Round a matrix (O, I) to int8. A row's largest absolute value becomes 127."""
    weight = weight.float().contiguous()
    scale = (weight.abs().amax(dim=1) / 127).clamp(min=1e-12)
    return Int8((weight / scale[:, None]).round().to(torch.int8), scale)


def to_int4(weight: Tensor) -> Int4:
    """Round a matrix (O, I) to int4. Raises InputError unless `GROUP` divides I.

    The number of a group that is furthest from 0 becomes -8, so its step has the opposite sign.
    """
    if weight.shape[1] % GROUP:
        raise InputError(f"int4 needs matrices of a width that {GROUP} divides, not {weight.shape[1]}")
    groups = weight.float().contiguous().view(len(weight), -1, GROUP)  # (O, I / GROUP, GROUP)
    low, high = groups.aminmax(dim=2)  # (O, I / GROUP) each
    furthest = torch.where(high > -low, high, low)
    scale = (furthest.abs().amax(dim=1) / (127 * 8)).clamp(min=1e-12)  # (O,)
    steps = (furthest / (-8 * scale[:, None])).round()  # (O, I / GROUP)
    steps[steps == 0] = 1
    levels = (groups / (steps * scale[:, None])[..., None]).round_().clamp_(-8, 7)
    return Int4(levels.flatten(1).to(torch.int8), steps.to(torch.int8), scale)


def is_rounded(name: str, weight: Tensor) -> bool:
    """Whether the weight of the layer of this name is rounded: all matrices except embeddings."""
    return weight.dim() == 2 and "embedding" not in name


def rounded_weight(name: str, weight: Tensor, rounding: Rounding) -> Int8 | Int4:
    """Round the weight of a layer. The head is never in int4: docs/log/generation.md tells why."""
    if rounding == "int8" or name == "head":
        return to_int8(weight)
    return to_int4(weight)


def rounding_of(name: WeightPrecision | Literal["auto", "pytorch"] | None) -> Rounding | None:
    """Return the rounding that a precision or a backend names; None if it names none."""
    return name if name == "int8" or name == "int4" else None


def in_precision(model: GPT, precision: WeightPrecision | None) -> GPT:
    """Return a model that computes with the weights of a precision; None keeps the model's own."""
    if precision is None:
        return model
    if rounding := rounding_of(precision):
        return rounded(model, rounding)
    return model.to(getattr(torch, precision))


def rounded(model: GPT, rounding: Rounding) -> GPT:
    """Return a model whose matrices have the rounded values. It shares all else with the model."""
    # deepcopy takes what is in this dictionary for copied already, so these tensors are shared.
    shared = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    result = copy.deepcopy(model, shared)
    for name, layer in result.named_modules():
        weight = getattr(layer, "weight", None)
        if isinstance(weight, Tensor) and is_rounded(name, weight):
            values = rounded_weight(name, weight.detach(), rounding).values()
            layer.weight = nn.Parameter(values.to(weight.dtype), requires_grad=False)
    return result
