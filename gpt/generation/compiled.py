"""Compute logits with the compiled program `step.cpp`, which replaces some 700 PyTorch operations.

The structures below are those of the same names in step.cpp: they tell it where the model's tensors are, the
model's sizes, and which tokens to read.

Shapes: N logits, D emb_dim, V vocab_size, O out_features, I in_features.
"""

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt.config import GPTConfig
from gpt.generation.cache import Cache, Read
from gpt.model import GPT
from gpt.weights.rounding import Int4, Int8, Rounding, is_rounded, rounded_weight

WIDTH_UNIT = 16  # `W` in step.cpp; a head's width must be a multiple of it, and the model's of twice as much

# The structures' fields, the names of these layers in a GPT or in one block, and the shapes of their weights:
# V vocab_size, C context_length, D emb_dim, I four times D.
_MODEL_LAYERS = {
    "tokens": ("token_embedding", "VD"),
    "positions": ("position_embedding", "CD"),
    "final_norm": ("final_norm", "D"),
    "head": ("head", "VD"),
}
_BLOCK_LAYERS = {
    "attention_norm": ("attention_norm", "D"),
    "query": ("attention.W_query", "DD"),
    "key": ("attention.W_key", "DD"),
    "value": ("attention.W_value", "DD"),
    "out": ("attention.out_proj", "DD"),
    "feed_forward_norm": ("feed_forward_norm", "D"),
    "up": ("feed_forward.up", "ID"),
    "down": ("feed_forward.down", "DI"),
}


class _Layer(ctypes.Structure):
    """The addresses of a layer's tensors: `scale` is null unless the weight is int8 or int4."""

    _fields_ = (
        ("weight", ctypes.c_void_p),  # (O, I), or (O,) of a norm; int4: see `_packed`
        ("scale", ctypes.c_void_p),  # (O,) float32
        ("bias", ctypes.c_void_p),  # (O,) float32
    )


class _Block(ctypes.Structure):
    _fields_ = tuple((field, _Layer) for field in _BLOCK_LAYERS)


class _Model(ctypes.Structure):
    _fields_ = (*((field, _Layer) for field in _MODEL_LAYERS), ("blocks", ctypes.POINTER(_Block)))


class _Call(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int64),  # of the matrices: 0 float32, 1 bfloat16, 2 int8, 3 int4
        ("bfloat16_embeddings", ctypes.c_int64),
        ("layers", ctypes.c_int64),
        ("D", ctypes.c_int64),
        ("H", ctypes.c_int64),
        ("V", ctypes.c_int64),
        ("exact_gelu", ctypes.c_int64),
        ("threads", ctypes.c_int64),
        ("N", ctypes.c_int64),  # how many tokens are read
    )


class _Token(ctypes.Structure):
    _fields_ = (
        ("id", ctypes.c_int64),
        ("position", ctypes.c_int64),
        ("cache", ctypes.c_void_p),  # where the keys and values of its text are, and their strides
        ("per_layer", ctypes.c_int64),
        ("per_part", ctypes.c_int64),
        ("per_head", ctypes.c_int64),
        ("scored", ctypes.c_int64),  # whether its logits are computed
    )


@dataclass(frozen=True)
class _Tensors:
    """The tensors of a layer, which must live while the program uses their addresses."""

    weight: Tensor
    scale: Tensor | None
    bias: Tensor

    def addresses(self) -> _Layer:
        scale = None if self.scale is None else self.scale.data_ptr()
        return _Layer(self.weight.data_ptr(), scale, self.bias.data_ptr())


class Compiled:
    """A backend that reads tokens of one or many texts into a cache, in one call of the program.

    The logits of a text do not depend on other texts in the call, on the number of threads, or on whether
    earlier tokens were read in the same call.

    Args:
        program: the result of `build`.
        model: the model. Its float32 or bfloat16 matrices are used in place, without a copy.
        rounding: round the matrices to int8 or int4.
        threads: how many threads compute, by default as many as PyTorch's.

    Raises:
        ValueError: the model has other tensors than a GPT, or tensors of another type.
    """

    def __init__(
        self,
        program: ctypes.CDLL,
        model: GPT,
        *,
        rounding: Rounding | None = None,
        threads: int | None = None,
    ) -> None:
        self.rounding = rounding
        self._threads = threads
        self.like = torch.zeros(())  # its device and type are those of a suitable cache
        self._config = model.config
        self._is_bfloat16 = model.head.weight.dtype == torch.bfloat16
        self._tensors = dict(_tensors(model, rounding))
        self._model = _Model(
            **{field: self._tensors[name].addresses() for field, (name, _) in _MODEL_LAYERS.items()},
            blocks=self._blocks(),
        )
        self._forward = program.forward
        self._forward.argtypes = (
            ctypes.POINTER(_Model),
            ctypes.POINTER(_Call),
            ctypes.POINTER(_Token),
            ctypes.c_void_p,
        )

    def read(self, reads: Sequence[Read], cache: Cache) -> Tensor:
        """Return the logits (N, V) of the scored tokens. Raises MemoryError if memory does not suffice."""
        tokens = list(_tokens(reads, cache))
        logits = torch.empty(sum(read.scored for read in reads), self._config.vocab_size)
        call = self._call(len(tokens))
        failed = self._forward(self._model, call, (_Token * len(tokens))(*tokens), logits.data_ptr())
        if failed:
            raise MemoryError(f"there is no memory to read {len(tokens)} tokens")
        return logits

    def _blocks(self) -> "ctypes.Array[_Block]":
        blocks = (_Block * self._config.num_layers)()
        for number, block in enumerate(blocks):
            for field, (name, _) in _BLOCK_LAYERS.items():
                setattr(block, field, self._tensors[f"blocks.{number}.{name}"].addresses())
        return blocks

    def _call(self, tokens: int) -> _Call:
        kind = 1 if self._is_bfloat16 else 0
        if self.rounding:
            kind = {"int8": 2, "int4": 3}[self.rounding]
        return _Call(
            kind=kind,
            bfloat16_embeddings=self._is_bfloat16,
            layers=self._config.num_layers,
            D=self._config.emb_dim,
            H=self._config.num_heads,
            V=self._config.vocab_size,
            exact_gelu=self._config.exact_gelu,
            threads=self._threads or torch.get_num_threads(),
            N=tokens,
        )


def _tokens(reads: Sequence[Read], cache: Cache) -> Iterator[_Token]:
    """Yield each token to read."""
    per_layer, per_part, per_row, per_head, *_ = cache.store.stride()
    for read in reads:
        address = cache.store.data_ptr() + cache.store.element_size() * per_row * read.row
        first_scored = len(read.tokens) - read.scored
        for position in range(read.held, len(read.tokens)):
            yield _Token(
                id=int(read.tokens[position]),
                position=position,
                cache=address,
                per_layer=per_layer,
                per_part=per_part,
                per_head=per_head,
                scored=position >= first_scored,
            )


def _tensors(model: GPT, rounding: Rounding | None) -> Iterator[tuple[str, _Tensors]]:
    """Yield the name and the tensors of each layer. All except matrices become float32.

    Raises ValueError unless the model has the tensors of a GPT, all of one type.
    """
    state = model.state_dict()
    dtype = model.head.weight.dtype
    is_plain = all(type(tensor) is Tensor and tensor.dtype == dtype for tensor in state.values())
    if not is_plain or dtype not in (torch.float32, torch.bfloat16):
        raise ValueError("its weights are not all float32 or all bfloat16")
    for name, shape in _shapes(model.config):
        weight = state.pop(f"{name}.weight", torch.empty(0))
        bias = state.pop(f"{name}.bias", torch.zeros(shape[0]))
        scale = None
        if weight.shape != shape or bias.shape != shape[:1]:
            raise ValueError("its layers are not those of GPT")
        weight = weight.float() if len(shape) == 1 else weight.contiguous()
        if rounding and is_rounded(name, weight):
            stored = rounded_weight(name, weight, rounding)
            scale = stored.scale
            weight = stored.levels if isinstance(stored, Int8) else _packed(stored)
        yield name, _Tensors(weight, scale, bias.float())
    if state:
        raise ValueError("its layers are not those of GPT")


def _shapes(config: GPTConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name of each layer of a GPT and the shape of its weight."""
    sizes = {
        "V": config.vocab_size,
        "C": config.context_length,
        "D": config.emb_dim,
        "I": 4 * config.emb_dim,
    }
    layers = list(_MODEL_LAYERS.values())
    for number in range(config.num_layers):
        layers += [(f"blocks.{number}.{name}", shape) for name, shape in _BLOCK_LAYERS.values()]
    for name, shape in layers:
        yield name, tuple(sizes[letter] for letter in shape)


def _packed(matrix: Int4) -> Tensor:
    """Return the matrix as `Group`s of step.cpp, (O / 8, I / GROUP, 136) uint8.

    The 136 bytes are the scales of a group for 8 outputs, and then 4 x 8 x 4 bytes of two levels each: parts
    of 8 inputs, outputs, inputs of half a part. The lower bits hold a part's first half, the upper bits its
    second.
    """
    rows, groups = matrix.steps.shape
    steps = matrix.steps.view(torch.uint8).view(rows // 8, 8, groups).mT  # (O / 8, I / GROUP, 8)
    # Axes: eights of outputs, output, group, part of the group, half of the part, input.
    levels = (matrix.levels + 8).view(torch.uint8).view(rows // 8, 8, groups, 4, 2, 4)
    lower, upper = levels.permute(4, 0, 2, 3, 1, 5)  # (O / 8, I / GROUP, 4, 8, 4) each
    return torch.cat([steps, (lower | upper << 4).flatten(2)], dim=2)
