"""Choose the backend of a model: the compiled program, if it gives the model's own results, else PyTorch.

Only results can tell, because names do not reveal edited source, a hook, an adapter or a quantized layer. So
the model's own `forward` reads a few texts, and a faster way is used only if it gives the same logits.

For a large model this takes as long as some tokens. So a note is kept that the program is right for these
weights (`notes.py`). A process that finds it compares only a tiny model.

Shapes: R texts, T tokens, P positions that are compared, V vocab_size.
"""

import ctypes
from dataclasses import replace
from typing import Literal, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from gpt.errors import InputError
from gpt.generation import build, notes
from gpt.generation.cache import Cache, Read
from gpt.generation.compiled import WIDTH_UNIT, Compiled
from gpt.generation.forward import Forward
from gpt.model import GPT
from gpt.progress import notice_once
from gpt.weights.formats.table import on_meta
from gpt.weights.rounding import Rounding, WeightPrecision, rounded, rounding_of

BackendName = Literal["auto", "pytorch"]
"""The names of what computes logits.

auto: the compiled program if it is built and gives the model's logits, else PyTorch. pytorch: always PyTorch.
"""
Backend = Compiled | Forward
AnyGPT = TypeVar("AnyGPT", bound=GPT)

_POSITIONS = 4  # how many positions are compared, the last ones of each text
_LEAST_CONTEXT = _POSITIONS + 2  # tokens; in a shorter context nothing can be compared
_LENGTH = 17  # tokens of a text; longer texts are used while weights times tokens stay below `_WORK`
_WORK = 400_000_000
# The texts are read as a prompt, a chunk and a single token. After each, so many tokens of a text are unread.
_UNREAD = (_POSITIONS, 1, 0)
# How much logits may differ: root mean square of the difference, relative to that of the logits. Measured:
# 3e-6 between float32 kernels, 0.034 between bfloat16 kernels, up to 0.09 between them and the products of
# int8 or int4. Another activation function gives 0.07 and more.
EXACT = 2e-5
_ROUNDED = 0.05
_WITH_INTEGERS = 0.15
_TINY_STD = 0.2  # of the tiny model's weights: large enough for a difference in any function to count


class _Result(NamedTuple):
    """The result of the comparison of a model. It holds no model, so that the model can be freed."""

    state: list[tuple[int, ...]]  # the model's `_state`, by which a later change is noticed
    compiled: Compiled | None  # the compiled program, if it gives the model's logits
    cache_is_correct: bool = False  # whether the model's `forward` gives the same logits with a cache


_results = WeakKeyDictionary[GPT, dict[tuple[bool, Rounding | None], _Result]]()
"""The results of each model, by whether there is a program and how it rounds."""
_roundings = WeakKeyDictionary[GPT, Rounding]()
"""Models that are decoded with rounded matrices. Their own weights are not changed."""


def for_decoding(model: AnyGPT, precision: WeightPrecision | None = None) -> AnyGPT:
    """Put a model into evaluation mode and choose the precision in which it is decoded; return the model.

    None keeps the present precision. int8 and int4 leave the weights as they are: the compiled program has
    rounded copies. Raises the errors of `backend_of`.
    """
    model.eval()
    if rounding := rounding_of(precision):
        _compiled(model, rounding)
        _roundings[model] = rounding
    elif precision is not None:
        model.to(getattr(torch, precision))
        _roundings.pop(model, None)
    return model


def suits_program(model: GPT) -> bool:
    """Whether the compiled program supports the model's device and widths."""
    width = model.config.emb_dim
    heads = model.config.num_heads
    has_suitable_widths = width % (2 * WIDTH_UNIT) == 0 and width // heads % WIDTH_UNIT == 0
    return has_suitable_widths and all(parameter.is_cpu for parameter in model.parameters())


def backend_of(model: GPT, name: BackendName = "auto") -> Backend:
    """Return the backend of this name. It gives the logits of the model's own `forward`.

    A model is compared once, and again when it has changed. For a model that `for_decoding` has put into int8
    or int4, the program is built if it does not exist. Raises InputError if that fails, if the program does
    not suit the model, or if PyTorch is to decode such a model.
    """
    if rounding := _roundings.get(model):
        if name == "pytorch":
            raise InputError(f"only the compiled program decodes in {rounding}: leave backend='pytorch' out")
        return _compiled(model, rounding)
    program = build.program() if name == "auto" and suits_program(model) else None
    result = _result(model, program, None)
    return result.compiled or Forward(model, cached=result.cache_is_correct)


def _compiled(model: GPT, rounding: Rounding) -> Compiled:
    """Return the program with the model's matrices rounded; the errors of `backend_of`."""
    if not suits_program(model):
        raise InputError(
            f"precision {rounding} is for a model on a CPU, of a width that {2 * WIDTH_UNIT} divides, "
            f"with heads whose width {WIDTH_UNIT} divides"
        )
    if model.config.context_length < _LEAST_CONTEXT:
        raise InputError(f"precision {rounding} is for a context of {_LEAST_CONTEXT} tokens or more")
    compiled = _result(model, build.build(), rounding).compiled
    assert compiled is not None  # else there was an error
    return compiled


def _result(model: GPT, program: ctypes.CDLL | None, rounding: Rounding | None) -> _Result:
    """Return the result of the model's comparison, from before if the model has not changed."""
    results = _results.setdefault(model, {})
    kind = program is not None, rounding
    if kind not in results:
        results[kind] = _compare_unless_noted(model, program, rounding)
    elif results[kind].state != _state(model):
        # Changed weights, as in training, get no note: they do not come again.
        results[kind] = _compare(model, program, rounding)
    return results[kind]


@torch.inference_mode()
def _compare_unless_noted(model: GPT, program: ctypes.CDLL | None, rounding: Rounding | None) -> _Result:
    """Return the result that an earlier process has noted, else that of `_compare`."""
    if program is None:
        return _compare(model, program, rounding)
    path = build.program_path()
    note = notes.key(model, program, path, rounding=rounding)
    if note and notes.has(path, note) and _computes_tiny(model, program):
        return _Result(_state(model), Compiled(program, model, rounding=rounding))
    result = _compare(model, program, rounding)
    if note and result.compiled:
        notes.keep(path, note)
    return result


def _computes_tiny(model: GPT, program: ctypes.CDLL) -> bool:
    """Whether the program gives the logits of a tiny float32 model of the same class.

    A change of PyTorch's own functions, or autocast, gives others.
    """
    config = replace(
        model.config, vocab_size=61, context_length=_LENGTH, emb_dim=2 * WIDTH_UNIT, num_heads=2, num_layers=2
    )
    try:
        with on_meta():
            tiny = type(model)(config)
        tiny.float().to_empty(device="cpu").restore_shared_tensors()
        generator = torch.Generator().manual_seed(0)
        for parameter in tiny.parameters():
            parameter.normal_(std=_TINY_STD, generator=generator)
        comparison = _Comparison(tiny)
        # With one thread none waits for another that gets no core.
        comparison.check(Compiled(program, tiny, threads=1), comparison.tolerance)
    except Exception:
        return False
    return True


@torch.inference_mode()
def _compare(model: GPT, program: ctypes.CDLL | None, rounding: Rounding | None) -> _Result:
    """Find out whether the program is correct, and else whether a cache is. None stands for no program.

    Raises InputError if the program is to round the weights and is not correct.
    """
    if model.config.context_length < _LEAST_CONTEXT:  # nothing can be compared: no program and no cache
        return _Result(_state(model), None)
    comparison = _Comparison(model)
    compiled = _correct_program(model, program, rounding, comparison) if program else None
    cache_is_correct = compiled is None and _cache_is_correct(model, comparison)
    return _Result(_state(model), compiled, cache_is_correct)


def _correct_program(
    model: GPT, program: ctypes.CDLL, rounding: Rounding | None, comparison: "_Comparison"
) -> Compiled | None:
    """Return the program for the model, or None and tell why if it does not give the model's logits.

    Raises InputError then if the program is to round the weights.
    """
    try:
        compiled = Compiled(program, model)
        comparison.check(compiled, comparison.tolerance)
        if rounding:  # beside PyTorch with rounded weights, as to round them changes logits by more
            compiled = Compiled(program, model, rounding=rounding)
            _Comparison(rounded(model, rounding)).check(compiled, _WITH_INTEGERS)
        return compiled
    except Exception as error:
        wrong = f"the compiled program does not compute this model: {error}"
        if rounding:
            raise InputError(f"precision {rounding} is for an unchanged model, but {wrong}") from None
        notice_once(f"PyTorch decodes, as {wrong}")
        return None


def _cache_is_correct(model: GPT, comparison: "_Comparison") -> bool:
    """Whether the model's `forward` gives the same logits with a cache. A line says if it does not."""
    try:
        comparison.check(Forward(model, cached=True), comparison.tolerance)
    except Exception as error:
        notice_once(f"each token reads its text again, as a cache does not suit this model: {error}")
        return False
    return True


class _Comparison:
    """Two texts, and the logits of their last tokens by the model's own `forward` without a cache.

    Other backends are compared with these.
    """

    def __init__(self, model: GPT) -> None:
        forward = Forward(model, cached=False)
        tokens = texts_to_compare(model)
        logits = forward.logits(tokens.to(forward.like.device), _POSITIONS + 1)
        self.config = model.config
        # The last token of the second text is left out, so that the rows of the cache differ in length.
        self.texts = [tokens[0].tolist(), tokens[1, :-1].tolist()]
        expected = torch.stack([logits[0, 1:], logits[1, :-1]])
        self.expected = expected.cpu().double()  # (R, P, V); MPS has no float64
        is_exact = forward.like.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
        self.tolerance = EXACT if is_exact else _ROUNDED

    def check(self, backend: Backend, tolerance: float) -> None:
        """Let the backend read the texts. Raises ValueError if its last logits are not those expected."""
        texts = self.texts
        cache = Cache(self.config, backend.like)
        cache.reserve(len(texts), len(texts[0]))
        logits: list[Tensor] = []
        held = [0] * len(texts)
        for unread in _UNREAD:
            ends = [len(text) - unread for text in texts]
            scored = ends[0] - held[0] if logits else 1  # of a prompt only the last token
            reads = [Read(row, text[: ends[row]], held[row], scored) for row, text in enumerate(texts)]
            logits.append(backend.read(reads, cache).view(len(texts), scored, -1))
            held = ends
        error = torch.cat(logits, dim=1)[:, -_POSITIONS:].cpu() - self.expected
        difference = error.square().mean().sqrt() / self.expected.square().mean().sqrt()
        if not difference <= tolerance:
            raise ValueError(f"its logits differ by {difference:.1g} of their size")


def texts_to_compare(model: GPT) -> Tensor:
    """Return two texts (R, T) on which two backends are compared.

    Each has at least `_LENGTH` tokens, if the context is long enough.
    """
    length = min(model.config.context_length, max(_LENGTH, _WORK // model.num_parameters()))
    # 7919 is a prime. Where it does not divide vocab_size, no id comes again before all others have come.
    return (torch.arange(2 * length) * 7919 % model.config.vocab_size).view(2, length)


def _state(model: GPT) -> list[tuple[int, ...]]:
    """Return a value that changes when a tensor is written, or anything in the model is replaced.

    These are its tensors, layers, hooks and attributes.
    """
    state: list[tuple[int, ...]] = []
    for module in model.modules():
        state.append((id(type(module)),))
        for attribute in vars(module).values():
            values = attribute.values() if isinstance(attribute, dict) else [attribute]
            state += map(_identity, values)
    return state


def _identity(value: object) -> tuple[int, ...]:
    """Return the object's identity, and for a tensor also its memory and how often it was written."""
    if isinstance(value, Tensor) and type(value) in (Tensor, nn.Parameter) and not value.is_inference():
        return id(value), value.data_ptr(), value._version
    return (id(value),)
