"""The compiled program's way to compute tokens: `step.cpp` in the place of some 700 operations of PyTorch.

Shapes: N logits, D emb_dim, V vocab_size, O out_features, I in_features.
"""

import ctypes
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gpt.config import GPTConfig
from gpt.generation.cache import Cache, Read
from gpt.model import GPT

LANES = 16  # `W` of step.cpp, which divides a head's width; twice as many divide the model's


class Compiled:
    """Reads tokens into caches, of one text or of many, in one call.

    Logits depend neither on what is read beside them nor on the number of threads, and not on whether the
    tokens before were read in the same call.

    Args:
        program: from `build`.
        model: whose float32 or bfloat16 matrices are read where they are; ValueError for other tensors.
        int8: round the matrices to int8.
    """

    def __init__(self, program: ctypes.CDLL, model: GPT, *, int8: bool = False) -> None:
        config = model.config
        narrow = model.head.weight.dtype == torch.bfloat16
        self.like = torch.zeros(())  # what caches are like
        self._step = program.step
        self._vocab_size = config.vocab_size
        self._tensors = list(_tensors(model, int8))  # alive as long as their addresses
        self._model = torch.tensor([0 if one is None else one.data_ptr() for one in self._tensors])
        sizes = config.num_layers, config.emb_dim, config.num_heads, config.vocab_size, config.exact_gelu
        self._shape = 2 if int8 else narrow, narrow, narrow or int8, *sizes

    def read(self, reads: Sequence[Read], cache: Cache) -> Tensor:
        """The logits (N, V) of the tokens to be scored; MemoryError where there is no memory for them."""
        start = cache.store.data_ptr()
        layer, part, row, head, *_ = cache.store.stride()
        tokens = []
        for read in reads:
            first = len(read.tokens) - read.scored
            place = (start + 4 * row * read.row, layer, part, head)
            tokens += [(read.tokens[i], i, *place, i >= first) for i in range(read.held, len(read.tokens))]
        shape = torch.tensor((*self._shape, torch.get_num_threads(), len(tokens)))
        given = torch.tensor(tokens, dtype=torch.int64)
        logits = torch.empty(sum(read.scored for read in reads), self._vocab_size)
        addresses = (ctypes.c_void_p(one.data_ptr()) for one in (self._model, shape, given, logits))
        if self._step(*addresses):
            raise MemoryError(f"there is no memory to read {len(tokens)} tokens")
        return logits


def _tensors(model: GPT, int8: bool) -> Iterator[Tensor | None]:
    """What the program reads, in its order; ValueError unless the model has the tensors of GPT, of one type.

    Of each layer it is the weight, the scales of a matrix in int8, and the bias; of float32 all but matrices.
    """
    state = model.state_dict()
    dtype = model.head.weight.dtype
    plain = all(type(one) is Tensor and one.dtype == dtype for one in state.values())
    if not plain or dtype not in (torch.float32, torch.bfloat16):
        raise ValueError("its weights are not all float32 or all bfloat16")
    for name, shape in _layers(model.config):
        weight = state.pop(f"{name}.weight", torch.empty(0))
        bias = state.pop(f"{name}.bias", torch.zeros(shape[0]))
        scale = None
        if weight.shape != shape or bias.shape != shape[:1]:
            raise ValueError("its layers are not those of GPT")
        weight = weight.float() if len(shape) == 1 else weight.contiguous()
        if int8 and len(shape) == 2 and "embedding" not in name:
            weight, scale = quantized(weight)
        yield from (weight, scale, bias.float())
    if state:
        raise ValueError("its layers are not those of GPT")


def _layers(config: GPTConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The names and the shapes of the weights of all layers, as `Model` of step.cpp has them."""
    width = config.emb_dim
    vocabulary = (config.vocab_size, width)
    yield "token_embedding", vocabulary
    yield "position_embedding", (config.context_length, width)
    yield "final_norm", (width,)
    yield "head", vocabulary
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
