"""Choose how a model's tokens are computed: by the compiled program, if it gives the model's own results.

Only results can tell, because names do not reveal edited source, a hook, an adapter or a quantized layer. So
the model's own `forward` reads a few texts, and a faster way is used only if it gives the same logits.

Shapes: R texts, T tokens, P positions that are compared, V vocab_size.
"""

import ctypes
import functools
from collections.abc import Sequence
from typing import Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from gpt.errors import InputError
from gpt.generation import build
from gpt.generation.cache import Cache, Read
from gpt.generation.compiled import LANES, Compiled
from gpt.generation.forward import Forward
from gpt.model import GPT
from gpt.progress import notice

Precision = Literal["float32", "bfloat16", "int8"]
Way = Compiled | Forward

_PLACES = 4  # how many positions are compared, the last ones of each text
_LENGTH = 17  # tokens of a text; longer texts are used while weights times tokens stay below `_WORK`
_WORK = 400_000_000
# How the texts are read. Each pair is a read: how many tokens stay unread after it, and how many logits it
# gives. The program's bits do not depend on this, so one read is enough. A cache is tested with a prompt, a
# chunk and a single token.
_AT_ONCE = ((0, _PLACES),)
_IN_PARTS = ((_PLACES, 1), (1, _PLACES - 1), (0, 1))
# How much logits may differ: root mean square of the difference, relative to that of the logits. Measured:
# 3e-6 between float32 kernels, 0.034 between bfloat16 kernels, 0.073 by rounding to int8. Another activation
# function gives 0.07 and more.
EXACT = 2e-5
_ROUNDED = 0.05
_INT8 = 0.15
_tell_once = functools.cache(notice)
# For each model, its state when it was tested, and the result: the program, or whether a cache is correct.
_known = WeakKeyDictionary[GPT, tuple[object, Compiled | bool]]()


def for_decoding(model: GPT, precision: Precision | None = None) -> GPT:
    """Put a model into evaluation mode and into a precision, and return it. None keeps its precision.

    Only the compiled program computes in int8. The model keeps its weights and a mark that says to round
    them. Raises InputError if the program cannot be built or does not suit the model.
    """
    model.eval()
    if precision is None:
        return model
    model.decodes_in_int8 = False
    if precision != "int8":
        return model.to(getattr(torch, precision))
    build.build()
    model.decodes_in_int8 = True
    if not isinstance(way_of(model), Compiled):
        model.decodes_in_int8 = False
        raise InputError(
            "precision int8 is for an unchanged model on a CPU, of a width that 32 divides, "
            "with heads whose width 16 divides"
        )
    return model


def suits_program(model: GPT) -> bool:
    """Whether the compiled program supports the model's device and widths."""
    width = model.config.emb_dim
    heads = model.config.num_heads
    return width % (2 * LANES) == 0 == width // heads % LANES and all(
        one.is_cpu for one in model.parameters()
    )


def way_of(model: GPT) -> Way:
    """Choose the program if it is built and gives the model's logits, else the model's own `forward`.

    The model is tested once, and again when it has changed.
    """
    program = build.program() if suits_program(model) else None
    state, way = _known.get(model, (None, False))
    if state != _state(model, program):
        way = _find_out(model, program)
        _known[model] = _state(model, program), way
    return way if isinstance(way, Compiled) else Forward(model, cached=way)


@torch.inference_mode()
def _find_out(model: GPT, program: ctypes.CDLL | None) -> Compiled | bool:
    """Test a model. Return the program if it is correct, else whether `forward` is correct with a cache."""
    if model.config.context_length < _PLACES + 2:
        return False
    own = Forward(model, cached=False)
    tokens = texts_to_compare(model)
    logits = own.logits(tokens.to(own.like.device), _PLACES + 1)
    # The last token of the second text is left out, so that the rows of the cache differ in length.
    expected = torch.stack([logits[0, 1:], logits[1, :-1]]).double()  # (R, P, V)
    texts = [tokens[0].tolist(), tokens[1, :-1].tolist()]

    def check(way: Way, parts: Sequence[tuple[int, int]], tolerance: float) -> None:
        """Read the texts in parts. Raises ValueError if the last logits are not those expected."""
        cache = Cache(model.config, way.like)
        found = []
        held = [0] * len(texts)
        cache.reserve(len(texts), len(texts[0]))
        for left, scored in parts:
            ends = [len(text) - left for text in texts]
            reads = [Read(row, text[: ends[row]], held[row], scored) for row, text in enumerate(texts)]
            found.append(way.read(reads, cache).view(len(texts), scored, -1))
            held = ends
        error = torch.cat(found, dim=1)[:, -_PLACES:] - expected
        difference = error.square().mean().sqrt() / expected.square().mean().sqrt()
        if not difference <= tolerance:
            raise ValueError(f"its logits differ by {difference:.1g} of their size")

    exact = own.like.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    tolerance = EXACT if exact else _ROUNDED
    if program:
        try:
            way = Compiled(program, model)
            check(way, _AT_ONCE, tolerance)
            if model.decodes_in_int8:
                way = Compiled(program, model, int8=True)
                check(way, _AT_ONCE, _INT8)
            return way
        except Exception as error:
            _tell_once(f"PyTorch decodes, as the compiled program does not compute this model: {error}")
    try:
        check(Forward(model, cached=True), _IN_PARTS, tolerance)
        return True
    except Exception as error:
        _tell_once(f"each token reads its text again, as a cache does not suit this model: {error}")
        return False


def texts_to_compare(model: GPT) -> Tensor:
    """Two texts (R, T) on which two ways to compute a model are compared.

    Each has at least `_LENGTH` tokens, if the context is long enough.
    """
    length = min(model.config.context_length, max(_LENGTH, _WORK // model.num_parameters()))
    return (torch.arange(2 * length) * 7919 % model.config.vocab_size).view(2, length)


def _state(model: GPT, program: ctypes.CDLL | None) -> list[tuple[int, ...]]:
    """A value that changes when a tensor is written, or a tensor, layer, hook or attribute is replaced."""
    found: list[tuple[int, ...]] = [(program is not None,)]
    for module in model.modules():
        for value in (type(module), *vars(module).values()):
            for one in value.values() if isinstance(value, dict) else [value]:
                counted = type(one) in (Tensor, nn.Parameter) and not one.is_inference()
                found.append((id(one), one.data_ptr(), one._version) if counted else (id(one),))
    return found
