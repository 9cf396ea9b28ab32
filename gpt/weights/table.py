"""The machinery of a conversion: a table of which weight is which, read in either direction.

Every other form of GPT-2 differs from this project's in names, in whether a matrix is stored transposed, and
in whether query, key and value are one matrix. A form is therefore a table of rows, and nothing else.

Shapes: D emb_dim, T context_length, V vocab_size.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gpt.config import GPTConfig
from gpt.errors import InputError

Weights = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One tensor of the other form, and what it is here."""

    theirs: str
    """Its name in the other form."""
    ours: tuple[str, ...]
    """Its name in a GPT's state dict. Several lie one below the other in the tensor, each as large."""
    shape: tuple[int, ...]
    """Its shape in the other form."""
    transposed: bool = False
    """Whether the other form keeps a matrix as (in, out), where a `torch.nn.Linear` has (out, in)."""


def linear(
    theirs: str, ours: Iterable[str], d_in: int, d_out: int, *, transposed: bool = False, bias: bool = True
) -> list[Row]:
    """The rows of a linear layer's weight and bias; `d_out` counts all of `ours` together."""
    shape = (d_in, d_out) if transposed else (d_out, d_in)
    names = tuple(ours)
    weight = Row(
        theirs=f"{theirs}.weight",
        ours=tuple(f"{name}.weight" for name in names),
        shape=shape,
        transposed=transposed,
    )
    if not bias:
        return [weight]
    return [weight, Row(theirs=f"{theirs}.bias", ours=tuple(f"{n}.bias" for n in names), shape=(d_out,))]


def to_gpt(state: Weights, rows: Iterable[Row], passed_over: str) -> Weights:
    """Another form's state dict as a GPT's; the tensors are views of the given ones.

    Args:
        state: the tensors by the other form's names.
        rows: its table.
        passed_over: a regular expression of the names that carry no weights, such as masks.

    Raises:
        InputError: a tensor is missing, unknown, or of another shape; the message names it.
    """
    weights: Weights = {}
    left = dict(state)
    for row in rows:
        if row.theirs not in left:
            raise InputError(f"the weights lack {row.theirs} of shape {row.shape}")
        tensor = left.pop(row.theirs)
        if tuple(tensor.shape) != row.shape:
            raise InputError(f"{row.theirs} has shape {tuple(tensor.shape)}, expected {row.shape}")
        tensor = tensor.T if row.transposed else tensor
        weights.update(zip(row.ours, tensor.chunk(len(row.ours)), strict=True))
    unknown = sorted(name for name in left if not re.fullmatch(passed_over, name))
    if unknown:
        shape = tuple(left[unknown[0]].shape)
        raise InputError(f"the weights hold {unknown[0]} of shape {shape}, which a GPT-2 has not")
    return weights


def from_gpt(weights: Weights, rows: Iterable[Row]) -> Weights:
    """A GPT's state dict in another form, each tensor contiguous; a bias that the GPT has not is zeros."""
    state: Weights = {}
    for row in rows:
        if row.ours[0] in weights:
            tensor = torch.cat([weights[name] for name in row.ours])
            state[row.theirs] = (tensor.T if row.transposed else tensor).contiguous()
        else:
            state[row.theirs] = torch.zeros(row.shape)
    return state


def crop(
    config: GPTConfig,
    weights: Weights,
    *,
    vocab_size: int | None = None,
    context_length: int | None = None,
) -> tuple[GPTConfig, Weights]:
    """The same model with fewer tokens in its vocabulary, or fewer positions: the first ones stay.

    Args:
        config: of the weights.
        weights: a GPT's state dict; the result shares its tensors.
        vocab_size: rows of the token embedding and the head to keep at most.
        context_length: rows of the position embedding to keep.

    Raises:
        InputError: a longer context is asked for than there are positions.
    """
    if context_length is not None and context_length > config.context_length:
        raise InputError(
            f"context_length {context_length} is more than the weights' {config.context_length} positions"
        )
    tokens = min(vocab_size or config.vocab_size, config.vocab_size)
    positions = context_length or config.context_length
    kept = {"token_embedding.weight": tokens, "head.weight": tokens, "position_embedding.weight": positions}
    cropped = {name: tensor[: kept[name]] if name in kept else tensor for name, tensor in weights.items()}
    return replace(config, vocab_size=tokens, context_length=positions), cropped
