"""Convert GPT-2 weights between programs with a table: one row for each tensor of the other program.

The programs differ in tensor names, in whether matrices are transposed, and in whether query, key and value
are one matrix. The same rows serve import and export.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gpt.config import GPTConfig
from gpt.errors import InputError
from gpt.model import GPT

Weights = dict[str, Tensor]
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Row:
    """One tensor of the other program and its counterpart here; `{}` in a name is the block number."""

    theirs: str
    """Its name in the other program."""
    ours: tuple[str, ...]
    """Its name in a GPT's state dict. Several tensors of equal size are concatenated along the first axis."""
    transposed: bool = False
    """Whether the other program stores the matrix as (in, out); `torch.nn.Linear` stores (out, in)."""

    def shape(self, ours: Shapes) -> tuple[int, ...]:
        """The tensor's shape in the other program, from the shapes of a GPT's tensors."""
        rows, *columns = ours[self.ours[0]]
        shape = (len(self.ours) * rows, *columns)
        return shape[::-1] if self.transposed else shape


def shapes(config: GPTConfig) -> Shapes:
    """The shape of each tensor in a GPT's state dict, blocks once as `blocks.{}`; without a tied head."""
    with torch.device("meta"):
        state = GPT(replace(config, num_layers=1)).state_dict()
    if config.tie_embeddings:
        del state["head.weight"]
    return {name.replace("blocks.0.", "blocks.{}."): tuple(tensor.shape) for name, tensor in state.items()}


def to_gpt(
    config: GPTConfig, state: Weights, rows: Iterable[Row], skipped: str, *, zero_biases: bool = False
) -> Weights:
    """Convert another program's state dict to a GPT's; the tensors are views of the given ones.

    Args:
        config: the model that the state dict holds.
        state: tensors by the other program's names.
        rows: the other program's table.
        skipped: a regular expression for names without weights, such as masks.
        zero_biases: let missing biases be zeros.

    Raises:
        InputError: a tensor is missing, unknown, or of another shape; the message names it.
    """
    weights: Weights = {}
    left = dict(state)
    expected = shapes(config)
    for row, block in _each(config, rows, expected):
        name, shape = row.theirs.format(block), row.shape(expected)
        if name not in left and not (zero_biases and name.endswith(".bias")):
            raise InputError(f"the weights lack {name} of shape {shape}")
        tensor = left.pop(name) if name in left else torch.zeros(shape)
        if tuple(tensor.shape) != shape:
            raise InputError(f"{name} has shape {tuple(tensor.shape)}, expected {shape}")
        parts = (tensor.T if row.transposed else tensor).chunk(len(row.ours))
        weights.update(zip([ours.format(block) for ours in row.ours], parts, strict=True))
    unknown = sorted(name for name in left if not re.fullmatch(skipped, name))
    if unknown:
        shape = tuple(left[unknown[0]].shape)
        raise InputError(f"the weights hold {unknown[0]} of shape {shape}, which GPT-2 does not have")
    return weights


def from_gpt(config: GPTConfig, weights: Weights, rows: Iterable[Row]) -> Weights:
    """Convert a GPT's state dict to another program's, each tensor contiguous.

    `config` may have biases that `weights` lack: they are zeros.
    """
    state: Weights = {}
    expected = shapes(config)
    for row, block in _each(config, rows, expected):
        names = [ours.format(block) for ours in row.ours]
        if names[0] in weights:
            tensor = torch.cat([weights[name] for name in names])
            state[row.theirs.format(block)] = (tensor.T if row.transposed else tensor).contiguous()
        else:
            state[row.theirs.format(block)] = torch.zeros(row.shape(expected))
    return state


def _each(config: GPTConfig, rows: Iterable[Row], expected: Shapes) -> Iterator[tuple[Row, int]]:
    """Each row whose tensors the model has, once for each block. Lazy: num_layers may be a lie."""
    for row in rows:
        if row.ours[0] in expected:
            blocks: Sequence[int] = range(config.num_layers) if "{}" in row.theirs else [0]
            yield from ((row, block) for block in blocks)
