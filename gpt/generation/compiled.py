"""The compiled program's way to compute tokens: `step.cpp` in the place of some 700 operations of PyTorch.

Shapes: N logits, V vocab_size, D emb_dim, O out_features, I in_features.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt.config import GPTConfig
from gpt.generation.build import Program
from gpt.generation.cache import Read, RowCache
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
        model: whose float32 or bfloat16 weights it reads where they are.
        int8: round the matrices to int8.

    Raises:
        TypeError: the model's layers are not those of `GPT`.
    """

    cached, graphs = True, False

    def __init__(self, program: Program, model: GPT, int8: bool = False) -> None:
        self.config, self._int8 = model.config, int8
        self._step = program.step
        self._dtype = model.token_embedding.weight.dtype
        if self._dtype not in (torch.float32, torch.bfloat16):
            raise TypeError(f"weights of type {self._dtype}")
        self.like = torch.zeros(())  # what caches are like
        self._tensors = self._weights(model)  # in the order of step.cpp, alive as long as their addresses
        self._model = torch.tensor([0 if one is None else one.data_ptr() for one in self._tensors])
        wide = self._dtype == torch.float32
        kind = 2 if int8 else 0 if wide else 1
        config = self.config
        sizes = config.num_layers, config.emb_dim, config.num_heads, config.vocab_size, config.exact_gelu
        self._shape = kind, not wide, int8 or not wide, *sizes

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

    def _weights(self, model: Any) -> list[Tensor | None]:
        width, size = self.config.emb_dim, self.config.vocab_size
        found: list[Tensor | None] = []
        found += [self._plain(model.token_embedding.weight, size, width)]
        found += [self._plain(model.position_embedding.weight, self.config.context_length, width)]
        found += self._norm(model.final_norm) + self._linear(model.head, size, width)
        if len(model.blocks) != self.config.num_layers:
            raise TypeError(f"{len(model.blocks)} blocks")
        for block in model.blocks:
            attention, feed_forward = block.attention, block.feed_forward
            found += self._norm(block.attention_norm)
            for part in (attention.W_query, attention.W_key, attention.W_value, attention.out_proj):
                found += self._linear(part, width, width)
            found += self._norm(block.feed_forward_norm)
            found += self._linear(feed_forward.up, 4 * width, width)
            found += self._linear(feed_forward.down, width, 4 * width)
        return found

    def _norm(self, norm: nn.LayerNorm) -> list[Tensor | None]:
        width = self.config.emb_dim
        return [self._plain(one, width).float() for one in (norm.weight, norm.bias)]

    def _linear(self, linear: nn.Linear, outside: int, inside: int) -> list[Tensor | None]:
        """The matrix, the scales of its rows and the bias, where there are any."""
        weight = self._plain(linear.weight, outside, inside)
        scale = bias = None  # of which the program reads whole vectors
        if linear.bias is not None:
            bias = F.pad(self._plain(linear.bias, outside).float(), (0, _LANES))
        if self._int8:
            weight, scale = quantized(weight)
            scale = F.pad(scale, (0, _LANES))
        return [weight, scale, bias]

    def _plain(self, tensor: Any, *shape: int) -> Tensor:
        """A tensor as the program reads it: of this shape and type, and nothing but its numbers."""
        if type(tensor) not in (Tensor, nn.Parameter) or (*tensor.shape,) != shape:
            raise TypeError(f"not the weights of {shape}")
        if tensor.dtype != self._dtype or not tensor.is_cpu:
            raise TypeError(f"weights of type {tensor.dtype} on {tensor.device}")
        return tensor.detach().contiguous()


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 (O, I) and the scale of each row (O,): 127 steps up to its largest."""
    weight = weight.float().contiguous()
    scale = (weight.abs().amax(dim=1) / 127).clamp(min=1e-12)
    return (weight / scale[:, None]).round().to(torch.int8), scale
