"""The decoding step as one compiled program, `step.cpp`, in the place of some 700 operations of PyTorch.

The program depends on neither the shape nor the weights of a model. It is compiled once for a processor, in a
thread, and kept in the cache folder.

Shapes: N rows, V vocab_size.
"""

import ctypes
import functools
import hashlib
import os
import platform
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt.files import atomic_write, cache_folder
from gpt.generation.cache import RowCache
from gpt.generation.decoding import FusedAttention, is_packed
from gpt.generation.packed import Int8Linear
from gpt.model import GPT
from gpt.progress import notice

_SOURCE = Path(__file__).with_name("step.cpp")
_OPTIONS = ("-O2", "-march=native", "-std=gnu++17", "-fPIC", "-shared", "-fopenmp", "-Wl,--as-needed")
_LANES = 16  # `W` of step.cpp
_WORTH = 10_000_000  # weights; a smaller model has written a text before the program is compiled
_KINDS = (torch.float32, torch.bfloat16, torch.int8)


class CompiledStep:
    """Appends a token to each row of a cache in one call; `ready` says whether the program is compiled.

    The logits of a row depend neither on the other rows nor on the number of threads.
    """

    def __init__(self, model: GPT) -> None:
        config, whole = model.config, cast(Any, model)
        layers = [whole.final_norm, whole.head]  # in the order of step.cpp
        for block in whole.blocks:
            layers += [block.attention_norm, block.attention.W_qkv, block.attention.out_proj]
            layers += [block.feed_forward_norm, block.feed_forward.up, block.feed_forward.down]
        embeddings = whole.token_embedding, whole.position_embedding
        self._tensors = [embedding.weight.contiguous() for embedding in embeddings]
        self._tensors += [tensor for layer in layers for tensor in _tensors(layer)]
        addresses = [None if tensor is None else tensor.data_ptr() for tensor in self._tensors]
        self._model = (ctypes.c_void_p * len(addresses))(*addresses)
        kind = _KINDS.index(whole.head.weight.dtype)
        rounds = isinstance(whole.head, Int8Linear) or whole.head.dtype == torch.bfloat16
        sizes = config.num_layers, config.emb_dim, config.num_heads, config.vocab_size, config.exact_gelu
        self._shape, self._vocab_size = (kind, rounds, *sizes), config.vocab_size
        self._path = cache_folder() / "compiled" / _name()
        if sum(tensor.numel() for tensor in self._tensors if tensor is not None) >= _WORTH:
            _compile_once(self._path)

    @classmethod
    def of(cls, model: GPT) -> "CompiledStep | None":
        """The step of a model from `for_decoding`; None if the program does not compute what it does."""
        width, heads = model.config.emb_dim, model.config.num_heads
        fits = width % (2 * _LANES) == 0 == width // heads % _LANES
        return cls(model) if fits and is_packed(model) and _as_built(model) else None

    @property
    def ready(self) -> bool:
        """Whether it can be called."""
        return self._path.is_file() and _load(self._path) is not None

    def __call__(self, tokens: Sequence[int], cache: RowCache) -> Tensor:
        """Logits (N, V) after one more token of each row."""
        store, lengths = cache.append()  # (layers, 2, rows, H, columns, K) and (N,)
        newest, logits = torch.tensor(tokens), torch.empty(len(tokens), self._vocab_size)
        shape = (*self._shape, torch.get_num_threads(), len(tokens), *store.stride()[:4])
        addresses = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (newest, lengths, store, logits))
        program = cast(ctypes.CDLL, _load(self._path))
        program.step(self._model, (ctypes.c_int64 * len(shape))(*shape), *addresses)
        return logits


def _as_built(model: GPT) -> bool:
    """Whether the modules have the sizes and options that `GPT` gives them."""
    config, width = model.config, model.config.emb_dim
    shapes = {
        "token_embedding": (config.vocab_size, width),
        "position_embedding": (config.context_length, width),
        "W_qkv": (3 * width, width),
        "out_proj": (width, width),
        "up": (4 * width, width),
        "down": (width, 4 * width),
        "head": (config.vocab_size, width),
    }

    def same(name: str, module: Any) -> bool:
        if isinstance(module, nn.LayerNorm):
            return module.eps == 1e-5 and module.normalized_shape == (width,) and module.bias is not None
        if isinstance(module, nn.GELU):
            return module.approximate == ("none" if config.exact_gelu else "tanh")
        if isinstance(module, FusedAttention):
            return module.num_heads == config.num_heads and module.mask is not None
        return name not in shapes or module.weight.shape == shapes[name]

    modules = ((path.rpartition(".")[2], module) for path, module in model.named_modules())
    return len(model.blocks) == config.num_layers and all(same(*one) for one in modules)


def _tensors(layer: Any) -> list[Tensor | None]:
    """What `Norm` or `Linear` of step.cpp points to; the program reads whole vectors of scales."""
    bias = None if layer.bias is None else layer.bias.float()
    if isinstance(layer, nn.LayerNorm):
        return [layer.weight, bias]
    scale = F.pad(layer.scale.float(), (0, _LANES)) if isinstance(layer, Int8Linear) else None
    return [layer.weight.contiguous(), scale, bias]


@functools.cache
def _name() -> str:
    """Of the program for this processor."""
    processor, information = platform.processor(), Path("/proc/cpuinfo")
    if information.exists():
        lines = set(information.read_text(encoding="utf-8").splitlines())
        processor += str(
            sorted(line for line in lines if line.startswith(("model name", "flags", "Features")))
        )
    key = repr((_SOURCE.read_bytes(), _OPTIONS, torch.__version__, platform.machine(), processor))
    return f"step-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"


@functools.cache
def _compile_once(path: Path) -> None:
    if not path.is_file():
        threading.Thread(target=compile_step, args=(path,), name="compiling").start()


def compile_step(path: Path) -> None:
    """Compile the program; without a compiler, only say so."""
    # Linked with torch's own OpenMP: the idle threads of a second one would keep the processor busy.
    openmp = Path(torch.__file__).parent.glob("lib/libgomp*")
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder, path.name)
        command = [os.environ.get("CXX", "g++"), str(_SOURCE), *map(str, openmp), *_OPTIONS, "-o", str(built)]
        try:
            subprocess.run(
                command, check=True, capture_output=True, text=True, encoding="utf-8", errors="replace"
            )
            with atomic_write(path, "wb") as file:
                file.write(built.read_bytes())
        except (OSError, subprocess.CalledProcessError) as error:
            reason = getattr(error, "stderr", "").partition("\n")[0] or str(error)
            notice(f"decoding is slower than it could be: its program cannot be compiled: {reason}")


@functools.cache
def _load(path: Path) -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:  # of another machine, for example
        notice(f"decoding is slower than it could be: its program cannot be loaded, delete it: {error}")
        return None
    library.step.restype = None
    return library
