"""Convert GPT-2 weights between programs with a table of the tensors' names, in both directions."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gpt.config import GPTConfig
from gpt.errors import InputError
from gpt.model import GPT

Weights = dict[str, Tensor]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Row:
    """One tensor of another program, and the tensors of a GPT that it holds."""

    theirs: str
    """Its name in the other program; `{}` stands for the number of a block."""
    ours: tuple[str, ...]
    """The names in a GPT; several tensors are concatenated along the first axis."""
    transposed: bool = False
    """Whether it is stored as (in, out); `torch.nn.Linear` stores (out, in)."""

    def of_blocks(self, num_layers: int) -> "Iterator[Row]":
        """Yield the row for each block; once if its name has no `{}`.

        They are yielded one by one, because an untrusted configuration may ask for billions of blocks.
        """
        for block in range(num_layers if "{}" in self.theirs else 1):
            ours = tuple(name.format(block) for name in self.ours)
            yield Row(self.theirs.format(block), ours, self.transposed)


def row(theirs: str, *ours: str, transposed: bool = False) -> Row:
    """Return the row of a tensor, given its name there, and the name or names of what it holds here."""
    return Row(theirs, ours, transposed)


def layer(theirs: str, *ours: str, transposed: bool = False) -> tuple[Row, Row]:
    """Return the rows of a layer's weight and bias, given the layer's names as in `row`."""
    weights = (f"{name}.weight" for name in ours)
    biases = (f"{name}.bias" for name in ours)
    return row(f"{theirs}.weight", *weights, transposed=transposed), row(f"{theirs}.bias", *biases)


HEADS = ("token_embedding.weight", "head.weight")
"""The tensors of a GPT with a row for each token; a tied head is not stored."""
Table = tuple[Row, ...]
"""All tensors of another program's GPT-2."""
# Masks in the files of transformers and nanoGPT, and in those of the book. They are not read.
_MASK = re.compile(r"transformer\.h\.\d+\.attn\.(masked_)?bias|trf_blocks\.\d+\.att\.mask")


class _WithoutValues(TorchFunctionMode):
    """A mode that skips what only gives values to a tensor: `torch.nn.init`, and a mask's `triu`.

    On the meta device tensors have no values. Yet `normal_` and `triu` would import PyTorch's compiler there,
    to find the shape of their result, and that takes a second.
    """

    def __torch_function__(
        self,
        function: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if function is Tensor.triu:
            return args[0]
        if getattr(function, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"]
        return function(*args, **kwargs)


@contextmanager
def on_meta() -> Iterator[None]:
    """Build modules without using memory or random numbers."""
    with torch.device("meta"), _WithoutValues():
        yield


def shapes(config: GPTConfig) -> dict[str, Shape]:
    """Return the shapes of a GPT's tensors, without a tied head; `blocks.{}` stands for every block.

    They are those of the model itself, so they follow an edit of `gpt/model.py`.
    """
    with on_meta():
        state = GPT(replace(config, num_layers=1)).state_dict()
    if config.tie_embeddings:
        del state["head.weight"]
    return {name.replace("blocks.0.", "blocks.{}."): tuple(tensor.shape) for name, tensor in state.items()}


def to_gpt(config: GPTConfig, state: Weights, table: Table, *, zero_biases: bool = False) -> Weights:
    """Convert another program's state dict to a GPT's; the tensors are views of the given ones.

    With `zero_biases`, missing biases are zeros. Any other tensor that is missing, unknown, or of another
    shape or type raises InputError with its name.
    """
    weights: Weights = {}
    left = dict(state)
    for row, expected in _expected(config, table):
        name = row.theirs
        if zero_biases and name.endswith(".bias"):
            left.setdefault(name, torch.zeros(expected))
        if name not in left:
            raise InputError(f"the weights lack {name} of shape {expected}")
        tensor = left.pop(name)
        shape = tuple(tensor.shape)
        if shape != expected or not tensor.is_floating_point():
            raise InputError(f"{name} has shape {shape}, expected {expected} in floating point")
        parts = (tensor.T if row.transposed else tensor).chunk(len(row.ours))
        weights.update(zip(row.ours, parts, strict=True))
    heads = {row.theirs for row in table if row.ours == ("head.weight",)}  # a tied one is left
    if unknown := sorted(name for name in left if name not in heads and not _MASK.fullmatch(name)):
        shape = tuple(left[unknown[0]].shape)
        raise InputError(f"the weights hold {unknown[0]} of shape {shape}, which GPT-2 does not have")
    return weights


def from_gpt(config: GPTConfig, weights: Weights, table: Table) -> Weights:
    """Convert a GPT's state dict to another program's, the opposite of `to_gpt`.

    The weights have to pass `check_known`. A combined bias of query, key and value is zeros where the GPT has
    none.
    """
    state: Weights = {}
    for row, shape in _expected(replace(config, qkv_bias=True), table):
        if row.ours[0] in weights:
            tensor = torch.cat([weights[name] for name in row.ours])
            state[row.theirs] = (tensor.T if row.transposed else tensor).contiguous()
        elif len(row.ours) > 1:
            state[row.theirs] = torch.zeros(shape)
    return state


def check_known(config: GPTConfig, weights: Weights, table: Table) -> None:
    """Raise InputError for a tensor that the other program lacks, or that it needs and the GPT lacks."""
    known = {name for row in table for one in row.of_blocks(config.num_layers) for name in one.ours}
    optional = {"head.weight"} if config.tie_embeddings else set()
    if not config.qkv_bias:
        optional |= {name for name in known if name.endswith(("W_query.bias", "W_key.bias", "W_value.bias"))}
    for name in sorted(weights.keys() - known):
        shape = tuple(weights[name].shape)
        raise InputError(f"the edited gpt/ has a tensor {name} of shape {shape}, which GPT-2 does not have")
    for name in sorted(known - optional - weights.keys()):
        raise InputError(f"the edited gpt/ has no tensor {name}, which GPT-2 has")


def check_complete(config: GPTConfig, weights: Weights) -> Weights:
    """Check this project's own state dict, drop a tied head; raises the errors of `to_gpt`."""
    names = dict.fromkeys([*shapes(config), "head.weight"])
    return to_gpt(config, weights, tuple(row(name, name) for name in names))


def _expected(config: GPTConfig, table: Table) -> Iterator[tuple[Row, Shape]]:
    """Yield the row and the shape of each tensor that the other program's state dict must have."""
    sizes = shapes(config)
    for row in table:
        if row.ours[0] in sizes:
            first, *others = sizes[row.ours[0]]
            shape = (len(row.ours) * first, *others)
            for one in row.of_blocks(config.num_layers):
                yield one, shape[::-1] if row.transposed else shape
