"""Note which models the compiled program computes as PyTorch does, so that a file of weights is tested once.

The comparison of `decoding.py` reads a whole model, which takes a process about 0.3 s for GPT-2 small
(docs/log/generation.md). Notes save this time. The comparison's result depends on nothing but what `key`
hashes. So a process that finds the key among the notes needs no comparison of this model. It still compares a
tiny one, because no hash covers changes to PyTorch itself.

A model that holds anything unknown has no key, and is compared in each process. Such are hooks, layers or
functions that are not this package's or torch's, and a package that was edited after it was loaded.
"""

import ctypes
import hashlib
import os
import sys
import time
import typing
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as modules_of_torch

from gpt.attention import kernels, multi_head
from gpt.config import GPTConfig
from gpt.errors import InputError
from gpt.files import Folder, atomic_write, file_sha256
from gpt.generation.compiled import Compiled
from gpt.model import GPT
from gpt.weights.rounding import Rounding

# In seconds, when this module was imported; a file changed later may differ from the loaded code.
_LOADED = time.time()
_PACKAGE = Path(__file__).parents[1]
# Where the functions are written that a model may call. `NamedTuple` is a function too.
_KNOWN_FILES = (f"{_PACKAGE}{os.sep}", f"{Path(torch.__file__).parent}{os.sep}", typing.__file__)
# Whose functions a GPT calls, besides those of its classes.
_MODULES = (sys.modules[GPT.__module__], multi_head, kernels, functional)
_PLAIN = (bool, int, float, str, tuple, GPTConfig, type(None))  # attributes whose text says all
_PIECE = 1 << 20  # bytes that are hashed together
_HASHES = 8  # `HASHES` in step.cpp: hashes of a piece
_MOST_NOTES = 1000  # the oldest are dropped


class _Piece(ctypes.Structure):
    """`Piece` in step.cpp."""

    _fields_ = (("bytes", ctypes.c_void_p), ("size", ctypes.c_int64))


class _UnknownError(Exception):
    """The model has something whose effect is not known."""


def key(model: GPT, program: ctypes.CDLL, path: Path, *, rounding: Rounding | None) -> str | None:
    """Return a hash of all that decides what the comparison of a model and the program at `path` finds.

    None if something in the model is unknown.
    """
    try:
        parts = [
            *_layers(model),
            _source(model),
            _values(model, program),
            path.name,  # of this processor's instructions
            file_sha256(path),
            torch.__version__,
            torch.get_num_threads(),
            torch.get_float32_matmul_precision(),
            rounding,
        ]
    except (_UnknownError, OSError):
        return None
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def has(path: Path, note: str) -> bool:
    """Whether this note is kept beside the program at `path`."""
    return note in _notes(path)


def keep(path: Path, note: str) -> None:
    """Keep a note beside the program at `path`. Nothing happens where it cannot be written."""
    notes = _notes(path)
    if note in notes:
        return
    with suppress(OSError), atomic_write(_file(path)) as file:
        file.write("".join(f"{line}\n" for line in [*notes, note][-_MOST_NOTES:]))


def _file(path: Path) -> Path:
    return path.with_suffix(".passed")


def _notes(path: Path) -> list[str]:
    """Return all notes. A damaged one is no note."""
    try:
        with Folder(path.parent) as folder:
            text = folder.read(_file(path).name).decode("utf-8", "replace")
    except (OSError, InputError):
        return []
    return [line for line in text.splitlines() if len(line) == 64]


def _layers(model: GPT) -> Iterator[object]:
    """Yield the type and the attributes of each layer; of tensors their number, so that ties are seen.

    Raises _UnknownError for a hook, and for an attribute that is neither a tensor nor plain data.
    """
    if modules_of_torch._global_forward_hooks or modules_of_torch._global_forward_pre_hooks:
        raise _UnknownError
    numbers: dict[int, int] = {}
    for module in model.modules():
        yield type(module).__module__, type(module).__qualname__
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers"):
                for tensor_name, tensor in value.items():
                    number = None if tensor is None else numbers.setdefault(id(tensor), len(numbers))
                    yield tensor_name, number
            elif name == "_modules":
                yield list(value)
            elif isinstance(value, dict):
                # Hooks. Those of state dicts are called when weights are loaded or saved, not in `forward`.
                if value and "state_dict" not in name:
                    raise _UnknownError
            elif isinstance(value, set):
                yield name, sorted(value)
            elif isinstance(value, _PLAIN):
                yield name, value
            else:
                raise _UnknownError


def _values(model: GPT, program: ctypes.CDLL) -> str:
    """Return a hash of the values of all tensors. Raises _UnknownError unless they are plain and on a CPU."""
    tensors = [*model.parameters(), *model.buffers()]
    for tensor in tensors:
        if type(tensor) not in (Tensor, nn.Parameter) or not tensor.is_cpu or tensor.layout != torch.strided:
            raise _UnknownError
    forms = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors]
    total = hashlib.sha256(repr(forms).encode())
    total.update(_hashes([tensor.detach().contiguous() for tensor in tensors], program))
    return total.hexdigest()


def _hashes(tensors: Sequence[Tensor], program: ctypes.CDLL) -> "ctypes.Array[ctypes.c_uint64]":
    """Return the hashes of each piece of the tensors, by the program: it reads as fast as memory allows.

    It is one call. Each call waits for all threads, which takes long while other programs need the cores.
    """
    pieces = [
        _Piece(tensor.data_ptr() + begin, min(_PIECE, tensor.nbytes - begin))
        for tensor in tensors
        for begin in range(0, tensor.nbytes, _PIECE)
    ]
    hashes = (ctypes.c_uint64 * (len(pieces) * _HASHES))()
    program.hash(
        (_Piece * len(pieces))(*pieces),
        ctypes.c_int64(len(pieces)),
        hashes,
        ctypes.c_int64(torch.get_num_threads()),
    )
    return hashes


def _source(model: GPT) -> str:
    """Return a hash of the package's source.

    Raises _UnknownError if a file has changed since it was loaded, or if a function of the model comes from
    elsewhere.
    """
    classes: set[type] = {kind for module in model.modules() for kind in type(module).__mro__}
    holders: list[type | ModuleType] = [*(classes - {object}), Compiled, *_MODULES]
    for holder in holders:
        _check_functions(holder)
    total = hashlib.sha256()
    for file in sorted(_PACKAGE.rglob("*.py")):
        status = file.stat()
        if max(status.st_mtime, status.st_ctime) > _LOADED:
            raise _UnknownError
        total.update(file.read_bytes())
    return total.hexdigest()


def _check_functions(holder: type | ModuleType) -> None:
    """Raise _UnknownError if a function of a class or a module has been replaced by another file's."""
    for value in tuple(vars(holder).values()):
        if isinstance(value, FunctionType):
            is_known = value.__code__.co_filename.startswith(_KNOWN_FILES)
        else:
            is_known = isinstance(value, BuiltinFunctionType | type) or type(value).__module__ == "typing"
        if callable(value) and not is_known:
            raise _UnknownError
