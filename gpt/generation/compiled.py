"""Compute logits with the compiled program `step.cpp`, which replaces some 700 PyTorch operations.

Shapes: N logits, D emb_dim, V vocab_size, O out_features, I in_features.
"""

import ctypes
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gpt.config import GPTConfig
from gpt.generation.cache import Cache, Read
from gpt.model import GPT

LANES = 16  # `W` in step.cpp; a head's width must be a multiple of it, and the model's of twice as much


class Compiled:
    """Reads tokens of one or many texts into a cache, in one call.

    The logits of a text do not depend on other texts in the call, on the number of threads, or on whether
    earlier tokens were read in the same call.

    Args:
        program: the result of `build`.
        model: the model. Its float32 or bfloat16 matrices are used in place, without a copy.
        int8: round the matrices to int8.

    Raises:
        ValueError: the model has other tensors than a GPT, or tensors of another type.
    """

    def __init__(self, program: ctypes.CDLL, model: GPT, *, int8: bool = False) -> None:
        config = model.config
        narrow = model.head.weight.dtype == torch.bfloat16
        self.like = torch.zeros(())  # its device and type are those of a suitable cache
        self._step = program.step
        self._vocab_size = config.vocab_size
        self._tensors = list(_tensors(model, int8))  # keeps the tensors alive while their addresses are used
        self._model = torch.tensor([0 if one is None else one.data_ptr() for one in self._tensors])
        sizes = config.num_layers, config.emb_dim, config.num_heads, config.vocab_size, config.exact_gelu
        self._shape = 2 if int8 else narrow, narrow, narrow or int8, *sizes

    def read(self, reads: Sequence[Read], cache: Cache) -> Tensor:
        """The logits (N, V) of the scored tokens. Raises MemoryError if memory does not suffice."""
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
    """Yield the tensors that the program reads, in its order.

    For each layer they are the weight, the scales (or None) of an int8 matrix, and the bias. All except
    matrices are float32. Raises ValueError unless the model has the tensors of a GPT, all of one type.
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
    """Yield the names and shapes of all layers' weights, in the order of `Model` in step.cpp."""
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
    """Round a matrix to int8: return it, (O, I), and the scale of each row, (O,).

    A row's largest absolute value becomes 127.
    """
    weight = weight.float().contiguous()
    scale = (weight.abs().amax(dim=1) / 127).clamp(min=1e-12)
    return (weight / scale[:, None]).round().to(torch.int8), scale
