"""How the tokens of a model are computed: by the compiled program, where its results are the model's own.

Results decide, because edited source, a hook, an adapter or a quantized layer cannot be told from names: the
model's own `forward` reads a few texts, and a faster way is taken only if it gives the same logits.

Shapes: R texts, P places that are compared, V vocab_size.
"""

import functools
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from gpt.errors import InputError
from gpt.generation import build
from gpt.generation.cache import Cache, Read
from gpt.generation.compiled import Compiled, fits
from gpt.generation.forward import Forward
from gpt.model import GPT
from gpt.progress import notice

Precision = Literal["float32", "bfloat16", "int8"]
Way = Compiled | Forward

_PLACES = 4  # that are compared: the last ones of each text, after so many lengths of it
_LENGTH = 16  # tokens of a text, or more where weights times tokens are no more than `_WORK`
_WORK = 400_000_000
# How much logits may differ, as roots of mean squares: between kernels of float32 3e-6 of them were seen, of
# bfloat16 0.034, and int8's rounding changes 0.073; another activation changes 0.07 and more.
_EXACT, _ROUNDED, _INT8 = 2e-5, 0.05, 0.15
_tell_once = functools.cache(notice)


def for_decoding(model: GPT, precision: Precision | None = None) -> GPT:
    """Put a model into evaluation mode and into a precision, and return it; None is its own.

    int8 is the compiled program's alone: the model keeps its weights, and InputError says what is missing.
    """
    if precision == "int8":
        if not suits_program(model):
            sizes = "a width that 32 divides and heads whose width 16 divides"
            raise InputError(f"precision int8 is for a CPU, {sizes}; expected float32 or bfloat16")
        try:
            build.build()
        except InputError as error:
            raise InputError(f"precision int8 needs the compiled program: {error}") from None
        decoder_of(model).int8 = True
        if not isinstance(decoder_of(model).way(model), Compiled):
            raise InputError("precision int8 is for an unchanged model, expected float32 or bfloat16")
    elif precision in ("float32", "bfloat16"):
        model.to(getattr(torch, precision))
    elif precision is not None:
        raise InputError(f"unknown precision {precision!r}, expected float32, bfloat16 or int8")
    return model.eval()


def suits_program(model: GPT) -> bool:
    """Whether the compiled program can read a model of this device and these widths."""
    return fits(model.config) and all(one.is_cpu for one in model.parameters())


class Decoder:
    """How the tokens of one model are computed, found out once; again where the model changed since."""

    def __init__(self) -> None:
        self.int8 = False
        self.caches: list[Cache] = []  # with recordings for a GPU, of engines that are done with them
        self._known: object = None  # the state of the model for which the rest was found
        self._program: Compiled | None = None
        self._cached = False

    def way(self, model: GPT, graphs: bool = True) -> Way:
        """The program if it is there and its logits are the model's, else the model's own `forward`."""
        program = build.program() if suits_program(model) else None
        if self._known != (program, _state(model)):
            self.caches, self._program, self._cached = [], None, False
            self._find_out(model, program)
            self._known = program, _state(model)
        return self._program or Forward(model, cached=self._cached, graphs=graphs)

    @torch.inference_mode()
    def _find_out(self, model: GPT, program: build.Program | None) -> None:
        own, texts = Forward(model, cached=False), _texts(model)
        if len(texts[0]) <= _PLACES:
            return
        first, second = own.logits(torch.tensor(texts, device=own.like.device), _PLACES + 1)
        texts[1].pop()  # another length
        expected, tolerance = torch.stack([first[1:], second[:-1]]), _tolerance(own.like)  # (R, P, V)
        if program:
            try:
                way = Compiled(program, model)
                _check(way, texts, expected, tolerance)
                if self.int8:
                    way = Compiled(program, model, int8=True)
                    _check(way, texts, expected, _INT8)
                self._program = way
                return
            except Exception as error:
                _tell_once(f"PyTorch decodes, as the compiled program does not compute this model: {error}")
        try:
            _check(Forward(model, cached=True), texts, expected, tolerance)
            self._cached = True
        except Exception as error:
            _tell_once(f"each token reads its text anew, as a cache does not suit this model: {error}")


_decoders: "WeakKeyDictionary[nn.Module, Decoder]" = WeakKeyDictionary()


def decoder_of(model: GPT) -> Decoder:
    """The one that is kept with the model."""
    return _decoders.setdefault(model, Decoder())


def _check(way: Way, texts: list[list[int]], expected: Tensor, tolerance: float) -> None:
    """Read texts in two parts, then their last tokens; ValueError for other logits than expected."""
    cache, found = Cache(way.config, way.like), []
    cache.reserve(len(texts), len(texts[0]))
    for begin, end, scored in ((None, -_PLACES, 1), (-_PLACES, -1, _PLACES - 1), (-1, None, 1)):
        reads = []
        for row, text in enumerate(texts):
            held = len(text[:begin]) if begin else 0
            reads.append(Read(row, held, text[begin:end], scored))
        found.append(way.read(reads, cache).view(len(texts), scored, -1))
    logits = torch.cat(found, dim=1)[:, 1:].double()  # (R, P, V); the first is of the first part
    difference = (logits - expected).square().mean().sqrt() / expected.double().square().mean().sqrt()
    if not difference <= tolerance:
        raise ValueError(f"its logits differ by {difference:.1g} of their size")


def _tolerance(like: Tensor) -> float:
    exact = like.dtype in (torch.float32, torch.float64)
    return _EXACT if exact and torch.get_float32_matmul_precision() == "highest" else _ROUNDED


def _texts(model: GPT) -> list[list[int]]:
    """Two texts, 32 tokens or more where the context is long enough."""
    weights, numbers = sum(one.numel() for one in model.parameters()), torch.Generator().manual_seed(0)
    length = min(model.config.context_length, max(_LENGTH, _WORK // weights))
    return torch.randint(model.config.vocab_size, (2, length), generator=numbers).tolist()


def _state(model: nn.Module) -> list[tuple[int, ...]]:
    """Another one after a tensor was written, or a tensor, layer, hook or attribute replaced."""
    found = []
    for module in model.modules():
        for value in (type(module), *vars(module).values()):
            held = value.values() if isinstance(value, dict) else [value]
            found += [(id(one), *_written(one)) for one in held]
    return found


def _written(value: Any) -> tuple[int, ...]:
    """Of a tensor: where it is, and how often it was written."""
    if type(value) not in (Tensor, nn.Parameter):
        return ()
    return value.data_ptr(), 0 if value.is_inference() else value._version
