"""The compiled program's way to compute tokens: `step.cpp` in the place of some 700 operations of PyTorch.

Shapes: N logits, V vocab_size, O out_features, I in_features.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from gpt.config import GPTConfig
from gpt.generation.build import Program
from gpt.generation.cache import Read, RowCache
from gpt.model import GPT
from gpt.weights.formats.table import shapes

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
        tensors = weights(model)
        if (dtype := tensors["head.weight"].dtype) not in (torch.float32, torch.bfloat16):
            raise ValueError(f"its weights are {dtype}")
        narrow = dtype == torch.bfloat16
        # In the order of step.cpp, and alive as long as their addresses.
        self._tensors = [one for name in tensors for one in _of_layer(name, tensors, int8)]
        self._model = torch.tensor([0 if one is None else one.data_ptr() for one in self._tensors])
        sizes = config.num_layers, config.emb_dim, config.num_heads, config.vocab_size, config.exact_gelu
        self._shape = 2 if int8 else narrow, narrow, narrow or int8, *sizes

    def read(self, reads: Sequence[Read]) -> Tensor:
        """The logits (N, V) of all reads; MemoryError where there is none for them."""
        tokens = []
        for read in reads:
            first, cache = len(read.tokens) - read.scored, (read.store.data_ptr(), *read.store.stride()[:3])
            tokens += [(id_, read.held + i, *cache, i >= first) for i, id_ in enumerate(read.tokens)]
        shape = torch.tensor((*self._shape, torch.get_num_threads(), len(tokens)))
        given = torch.tensor(tokens, dtype=torch.int64)
        logits = torch.empty(sum(read.scored for read in reads), self.config.vocab_size)
        addresses = (ctypes.c_void_p(one.data_ptr()) for one in (self._model, shape, given, logits))
        if self._step(*addresses):
            raise MemoryError(f"there is no memory to read {len(tokens)} tokens")
        return logits

    def step(self, tokens: Tensor, cache: RowCache) -> Tensor:
        """Append a token (N,) to each row of the cache; the logits (N, V) after them."""
        return self.read(cache.reads(tokens.tolist(), cache.append()))


def weights(model: GPT) -> dict[str, Tensor]:
    """A model's tensors by name, the blocks' last; ValueError unless they are those of `GPT`, of one type."""
    one_block = shapes(model.config)
    expected = {name: shape for name, shape in one_block.items() if "{}" not in name}
    expected.setdefault("head.weight", one_block["token_embedding.weight"])
    for i in range(model.config.num_layers):
        expected |= {name.format(i): shape for name, shape in one_block.items() if "{}" in name}
    found = model.state_dict()
    if {name: (*one.shape,) for name, one in found.items()} != expected:
        raise ValueError("its layers are not those of GPT")
    if any(type(one) is not Tensor or one.dtype != found["head.weight"].dtype for one in found.values()):
        raise ValueError("its weights are of several types")
    return {name: found[name] for name in expected}


def _of_layer(name: str, tensors: dict[str, Tensor], int8: bool) -> list[Tensor | None]:
    """What the program reads of a layer, given the name of its weight: of a bias alone, nothing.

    An embedding is one tensor. A norm has a weight and a bias, float32 both. A linear layer has a matrix, the
    scales of its rows and a bias, where there are any, and whole vectors of these are read.
    """
    layer, _, kind = name.rpartition(".")
    weight, bias, scale = tensors[name].contiguous(), tensors.get(f"{layer}.bias"), None
    if kind == "bias":
        return []
    if layer.endswith("embedding"):
        return [weight]
    if bias is not None:
        bias = F.pad(bias.float(), (0, _LANES))
    if layer.endswith("norm"):
        return [weight.float(), bias]
    if int8:
        weight, scale = quantized(weight)
        scale = F.pad(scale, (0, _LANES))
    return [weight, scale, bias]


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 (O, I) and the scale of each row (O,): 127 steps up to its largest."""
    weight = weight.float().contiguous()
    scale = (weight.abs().amax(dim=1) / 127).clamp(min=1e-12)
    return (weight / scale[:, None]).round().to(torch.int8), scale
