"""The compiled program's way to compute tokens: `step.cpp` in the place of some 700 operations of PyTorch.

Shapes: N logits, D emb_dim, V vocab_size, O out_features, I in_features.
"""

import ctypes
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from gpt.config import GPTConfig
from gpt.generation.build import Program
from gpt.generation.cache import Cache, Read
from gpt.model import GPT

_LANES = 16  # `W` of step.cpp


def fits(config: GPTConfig) -> bool:
    """Whether vectors divide the widths of a model and of its heads."""
    return config.emb_dim % (2 * _LANES) == 0 == config.emb_dim // config.num_heads % _LANES


class Compiled:
    """Reads tokens into caches, of one text or of many, in one call.

    Logits depend neither on what is read beside them nor on the number of threads, and not on whether the
    tokens before were read in the same call.

    Args:
        program: from `build`.
        model: whose float32 or bfloat16 matrices are read where they are; ValueError for other tensors.
        int8: round the matrices to int8.
    """

    cached, graphs = True, False

    def __init__(self, program: Program, model: GPT, *, int8: bool = False) -> None:
        self.config = config = model.config
        self.like = torch.zeros(())  # what caches are like
        self._step = program.step
        self._tensors = list(_tensors(model, int8))  # alive as long as their addresses
        self._model = torch.tensor([0 if one is None else one.data_ptr() for one in self._tensors])
        narrow = model.head.weight.dtype == torch.bfloat16
        sizes = config.num_layers, config.emb_dim, config.num_heads, config.vocab_size, config.exact_gelu
        self._shape = 2 if int8 else narrow, narrow, narrow or int8, *sizes

    def read(self, reads: Sequence[Read], cache: Cache) -> Tensor:
        """The logits (N, V) of the tokens to be scored; MemoryError where there is no memory for them."""
        start, (layer, part, row, head, *_) = cache.store.data_ptr(), cache.store.stride()
        tokens = []
        for read in reads:
            first, place = len(read.tokens) - read.scored, (start + 4 * row * read.row, layer, part, head)
            tokens += [(id_, read.held + i, *place, i >= first) for i, id_ in enumerate(read.tokens)]
        shape = torch.tensor((*self._shape, torch.get_num_threads(), len(tokens)))
        given = torch.tensor(tokens, dtype=torch.int64)
        logits = torch.empty(sum(read.scored for read in reads), self.config.vocab_size)
        addresses = (ctypes.c_void_p(one.data_ptr()) for one in (self._model, shape, given, logits))
        if self._step(*addresses):
            raise MemoryError(f"there is no memory to read {len(tokens)} tokens")
        return logits


def _tensors(model: GPT, int8: bool) -> Iterator[Tensor | None]:
    """What the program reads, in its order; ValueError unless the model has the tensors of GPT, of one type.

    An embedding is one tensor. A norm has a weight and a bias, float32 both. A linear layer has a matrix, the
    scales of its rows and a bias, where there are any, and whole vectors of these are read.
    """
    state, dtype = model.state_dict(), model.head.weight.dtype
    if any(type(one) is not Tensor or one.dtype != dtype for one in state.values()):
        raise ValueError("its weights are of several types")
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"its weights are {dtype}")
    for name, shape in _layers(model.config):
        weight, bias = (state.pop(f"{name}.{kind}", None) for kind in ("weight", "bias"))
        norm, scale = len(shape) == 1, None
        if weight is None or weight.shape != shape or (norm if bias is None else bias.shape != shape[:1]):
            raise ValueError("its layers are not those of GPT")
        weight = weight.float() if norm else weight.contiguous()
        if int8 and not norm and "embedding" not in name:
            weight, scale = quantized(weight)
            scale = F.pad(scale, (0, _LANES))
        yield weight
        if "embedding" in name:
            continue
        if not norm:
            yield scale
        yield None if bias is None else F.pad(bias.float(), (0, _LANES))
    if state:
        raise ValueError("its layers are not those of GPT")


def _layers(config: GPTConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The names and the shapes of the weights of all layers, as `Model` of step.cpp has them."""
    width, vocabulary = config.emb_dim, (config.vocab_size, config.emb_dim)
    yield from {
        "token_embedding": vocabulary,
        "position_embedding": (config.context_length, width),
        "final_norm": (width,),
        "head": vocabulary,
    }.items()
    for i in range(config.num_layers):
        yield f"blocks.{i}.attention_norm", (width,)
        for name in ("W_query", "W_key", "W_value", "out_proj"):
            yield f"blocks.{i}.attention.{name}", (width, width)
        yield f"blocks.{i}.feed_forward_norm", (width,)
        yield f"blocks.{i}.feed_forward.up", (4 * width, width)
        yield f"blocks.{i}.feed_forward.down", (width, 4 * width)


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 (O, I) and the scale of each row (O,): 127 steps up to its largest."""
    weight = weight.float().contiguous()
    scale = (weight.abs().amax(dim=1) / 127).clamp(min=1e-12)
    return (weight / scale[:, None]).round().to(torch.int8), scale
