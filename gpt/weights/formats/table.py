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


def row(theirs: str, *ours: str, transposed: bool = False) -> Row:
    """Return the row of a tensor, given its name there, and the name or names of what it holds here."""
    return Row(theirs, ours, transposed)


def layer(theirs: str, *ours: str, transposed: bool = False) -> tuple[Row, Row]:
    """Return the rows of a layer's weight and bias, given the layer's names as in `row`."""
    weights = (f"{name}.weight" for name in ours)
    biases = (f"{name}.bias" for name in ours)
    return row(f"{theirs}.weight", *weights, transposed=transposed), row(f"{theirs}.bias", *biases)


@dataclass(frozen=True)
class Table:
    """All tensors of another program's GPT-2."""

    rows: tuple[Row, ...]
    skipped: frozenset[str] = frozenset()
    """Names of tensors in its files that are not read, such as masks."""

    def names(self, num_layers: int) -> set[str]:
        """Return all names in a GPT with this number of blocks."""
        names = [name for row in self.rows for name in row.ours]
        return {name.format(block) for name in names for block in _blocks(name, num_layers)}

    def skips(self, name: str) -> bool:
        """Whether a tensor of the other program is not read."""
        return re.sub(r"(?<=\.)\d+(?=\.)", "{}", name, count=1) in self.skipped


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
    for expected in _expected(config, table):
        name = expected.name
        if zero_biases and name.endswith(".bias"):
            left.setdefault(name, torch.zeros(expected.shape))
        if name not in left:
            raise InputError(f"the weights lack {name} of shape {expected.shape}")
        tensor = left.pop(name)
        if tuple(tensor.shape) != expected.shape or not tensor.is_floating_point():
            shape = tuple(tensor.shape)
            raise InputError(f"{name} has shape {shape}, expected {expected.shape} in floating point")
        parts = (tensor.T if expected.transposed else tensor).chunk(len(expected.ours))
        weights.update(zip(expected.ours, parts, strict=True))
    if unknown := sorted(name for name in left if not table.skips(name)):
        shape = tuple(left[unknown[0]].shape)
        raise InputError(f"the weights hold {unknown[0]} of shape {shape}, which GPT-2 does not have")
    return weights


def from_gpt(config: GPTConfig, weights: Weights, table: Table) -> Weights:
    """Convert a GPT's state dict to another program's, the opposite of `to_gpt`.

    A combined bias of query, key and value is zeros where the GPT has none.

    Raises the errors of `check_known`.
    """
    check_known(config, weights, table)
    state: Weights = {}
    for expected in _expected(replace(config, qkv_bias=True), table):
        if expected.ours[0] in weights:
            tensor = torch.cat([weights[name] for name in expected.ours])
            state[expected.name] = (tensor.T if expected.transposed else tensor).contiguous()
        elif len(expected.ours) > 1:
            state[expected.name] = torch.zeros(expected.shape)
    return state


def check_known(config: GPTConfig, weights: Weights, table: Table) -> None:
    """Raise InputError for a tensor that the other program lacks, or that it needs and the GPT lacks."""
    known = table.names(config.num_layers)
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
    rows = tuple(row(name, name) for name in shapes(config))
    return to_gpt(config, weights, Table(rows, frozenset({"head.weight"})))


@dataclass(frozen=True)
class _Expected:
    """A tensor that another program's state dict must have: a row of the table, for one block."""

    name: str
    ours: tuple[str, ...]
    shape: Shape
    transposed: bool


def _expected(config: GPTConfig, table: Table) -> Iterator[_Expected]:
    """Yield each tensor that the other program's state dict must have for this configuration.

    They are yielded one by one, because an untrusted configuration may ask for billions of blocks.
    """
    sizes = shapes(config)
    for row in table.rows:
        if row.ours[0] not in sizes:
            continue
        first, *others = sizes[row.ours[0]]
        shape = (len(row.ours) * first, *others)
        if row.transposed:
            shape = shape[::-1]
        for block in _blocks(row.theirs, config.num_layers):
            ours = tuple(name.format(block) for name in row.ours)
            yield _Expected(row.theirs.format(block), ours, shape, row.transposed)


def _blocks(name: str, num_layers: int) -> range:
    """Return the numbers that `{}` in a name stands for; one, which is not used, for a name without `{}`."""
    return range(num_layers if "{}" in name else 1)
