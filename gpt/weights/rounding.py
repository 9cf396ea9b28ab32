"""Round matrices to int8 or int4, for decoding on a CPU and to measure what that costs.

In int8 a row has one scale. In int4 each `GROUP` neighbours of a row also have a step of their own, which is
a whole number of the row's scales: 4.25 bits a weight.

Shapes: O out_features, I in_features.
"""

import copy
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from gpt.errors import InputError
from gpt.model import GPT

Precision = Literal["float32", "bfloat16", "int8", "int4"]
Rounding = Literal["int8", "int4"]

GROUP = 32  # `GROUP` in step.cpp
# The level that a group's number furthest from 0 becomes, before it is clamped to -8. The one with the least
# squared error is taken. Five more levels between 6.8 and 9.2 would lessen the error by another 1 %.
_LEVELS = (-8.0, -8.4, -7.2)
_AT_ONCE = 1 << 16  # numbers that are rounded together: they stay in the processor's cache


class Int8(NamedTuple):
    """A matrix in int8."""

    steps: Tensor  # (O, I) int8
    scale: Tensor  # (O,) float32

    def values(self) -> Tensor:
        """Return the numbers (O, I) in float32."""
        return self.steps * self.scale[:, None]


@dataclass(frozen=True)
class Int4:
    """A matrix in int4."""

    levels: Tensor  # (O, I) int8, from -8 to 7
    steps: Tensor  # (O, I / GROUP) int8, of each group, in units of the row's scale
    scale: Tensor  # (O,) float32

    def values(self) -> Tensor:
        """Return the numbers (O, I) in float32."""
        return self.levels * (self.steps * self.scale[:, None]).repeat_interleave(GROUP, dim=1)


def quantized(weight: Tensor) -> Int8:
    """Round a matrix (O, I) to int8. A row's largest absolute value becomes 127."""
    weight = weight.float().contiguous()
    scale = (weight.abs().amax(dim=1) / 127).clamp(min=1e-12)
    return Int8((weight / scale[:, None]).round().to(torch.int8), scale)


def quantized_to_int4(weight: Tensor) -> Int4:
    """Round a matrix (O, I) to int4. Raises InputError unless `GROUP` divides I."""
    if weight.shape[1] % GROUP:
        raise InputError(f"int4 needs matrices of a width that {GROUP} divides, not {weight.shape[1]}")
    count = max(1, _AT_ONCE // weight.shape[1])
    parts = [_int4_of(rows) for rows in torch.split(weight.float(), count)]
    return Int4(
        torch.cat([part.levels for part in parts]),
        torch.cat([part.steps for part in parts]),
        torch.cat([part.scale for part in parts]),
    )


def _int4_of(rows: Tensor) -> Int4:
    """Round some rows (O, I)."""
    groups = rows.reshape(len(rows), -1, GROUP).permute(2, 0, 1).contiguous()  # fast sums over a group
    low, high = groups.aminmax(dim=0)  # (O, I / GROUP), as all that follow
    furthest = torch.where(high > -low, high, low)
    scale = (furthest.abs().amax(dim=1) / (127 * min(map(abs, _LEVELS)))).clamp(min=1e-12)
    least = torch.full_like(furthest, torch.inf)
    steps = torch.ones_like(furthest)
    for level in _LEVELS:
        tried = (furthest / (level * scale[:, None])).round()
        tried[tried == 0] = 1
        error = (_levels(groups, tried, scale) * (tried * scale[:, None]) - groups).square().sum(dim=0)
        steps = torch.where(error < least, tried, steps)
        least = torch.minimum(error, least)
    levels = _levels(groups, steps, scale).permute(1, 2, 0).flatten(1)
    return Int4(levels.to(torch.int8), steps.to(torch.int8), scale)


def _levels(groups: Tensor, steps: Tensor, scale: Tensor) -> Tensor:
    """Return the nearest levels (GROUP, O, I / GROUP), in float32."""
    return (groups / (steps * scale[:, None])).round_().clamp_(-8, 7)


def is_rounded(name: str, weight: Tensor) -> bool:
    """Whether the weight of the layer of this name is rounded: all matrices except embeddings."""
    return weight.dim() == 2 and "embedding" not in name


def rounded_weight(name: str, weight: Tensor, rounding: Rounding) -> Int8 | Int4:
    """Round the weight of a layer. With int4 the head is in int8: docs/log/generation.md tells why."""
    return quantized_to_int4(weight) if rounding == "int4" and name != "head" else quantized(weight)


def in_precision(model: GPT, precision: Precision | None) -> GPT:
    """Return a model that computes with the weights of a precision; None keeps the model's own."""
    if precision is None:
        return model
    if precision == "int8" or precision == "int4":
        return rounded(model, precision)
    return model.to(getattr(torch, precision))


def rounded(model: GPT, rounding: Rounding) -> GPT:
    """Return a model whose matrices have the rounded values. It shares all else with the model."""
    shared = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    result = copy.deepcopy(model, shared)
    for name, layer in result.named_modules():
        weight = getattr(layer, "weight", None)
        if isinstance(weight, Tensor) and is_rounded(name, weight):
            values = rounded_weight(name, weight.detach(), rounding).values()
            layer.weight = nn.Parameter(values.to(weight.dtype), requires_grad=False)
    return result
