"""The model as one compiled program, `step.cpp`, in the place of some 700 operations of PyTorch.

It suits all models, is compiled once for a processor, in a thread, and is kept in the cache folder.

Shapes: N logits, V vocab_size.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt.files import atomic_write, cache_folder
from gpt.generation.cache import Read
from gpt.generation.decoding import Int8Linear, is_packed
from gpt.model import GPT
from gpt.progress import notice

_SOURCE = Path(__file__).with_name("step.cpp")
_OPTIONS = ("-O2", "-march=native", "-std=gnu++17", "-fPIC", "-shared", "-fopenmp", "-Wl,--as-needed")
_LANES = 16  # `W` of step.cpp
_WORTH = 10_000_000  # weights; a smaller model has written a text before the program is compiled


class CompiledStep:
    """Reads tokens into caches, of one text or of many, in one call; `ready`: the program is compiled.

    Logits depend neither on what is read beside them nor on the number of threads, and not on whether the
    tokens before were read in the same call.
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
        self._model = torch.tensor([0 if tensor is None else tensor.data_ptr() for tensor in self._tensors])
        kind = (torch.float32, torch.bfloat16, torch.int8).index(whole.head.weight.dtype)
        rounds = isinstance(whole.head, Int8Linear) or whole.head.dtype == torch.bfloat16
        sizes = config.num_layers, config.emb_dim, config.num_heads, config.vocab_size, config.exact_gelu
        self._shape, self._vocab_size = (kind, rounds, *sizes), config.vocab_size
        self._path = _folder() / _name()
        if sum(tensor.numel() for tensor in self._tensors if tensor is not None) >= _WORTH:
            self.compile()

    @classmethod
    def of(cls, model: GPT) -> "CompiledStep | None":
        """The step of a model that `for_decoding` packed, of a width that vectors divide; else None."""
        width, heads = model.config.emb_dim, model.config.num_heads
        fits = width % (2 * _LANES) == 0 == width // heads % _LANES
        return cls(model) if fits and is_packed(model) else None

    @property
    def ready(self) -> bool:
        """Whether it can be called."""
        return _is_mine(self._path) and _load(self._path) is not None

    def compile(self) -> None:
        """Begin to compile the program unless it is there."""
        if not _is_mine(self._path):
            _compile_once(self._path)

    def __call__(self, reads: Sequence[Read]) -> Tensor:
        """The logits (N, V) of all reads."""
        tokens = []
        for read in reads:
            first, cache = len(read.tokens) - read.scored, (read.store.data_ptr(), *read.store.stride()[:3])
            tokens += [(id_, read.held + i, *cache, i >= first) for i, id_ in enumerate(read.tokens)]
        shape = torch.tensor((*self._shape, torch.get_num_threads(), len(tokens)))
        given = torch.tensor(tokens, dtype=torch.int64)
        logits = torch.empty(sum(read.scored for read in reads), self._vocab_size)
        addresses = (ctypes.c_void_p(one.data_ptr()) for one in (self._model, shape, given, logits))
        cast(ctypes.CDLL, _load(self._path)).step(*addresses)
        return logits


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
    described = Path("/proc/cpuinfo")
    lines = set(described.read_text(encoding="utf-8").splitlines() if described.exists() else ())
    processor = sorted(line for line in lines if line.startswith(("model name", "flags", "Features")))
    machine = torch.__version__, platform.machine(), platform.processor(), processor
    key = repr((_SOURCE.read_bytes(), _OPTIONS, *machine))
    return f"step-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"


def _folder() -> Path:
    """Where the program is kept: it is run, so where others can write it is made anew for each process."""
    folder = cache_folder() / "compiled"
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder if _is_mine(folder) else Path(_private_folder().name)


_private_folder = functools.cache(tempfile.TemporaryDirectory)  # until the process ends


def _is_mine(path: Path) -> bool:
    """Whether it exists and nobody else can have written it."""
    try:
        status = path.stat()
    except OSError:
        return False
    return os.name == "nt" or (status.st_uid == os.getuid() and not status.st_mode & 0o022)


@functools.cache
def _compile_once(path: Path) -> None:
    threading.Thread(target=compile_step, args=(path,), name="compiling").start()


def compile_step(path: Path) -> None:
    """Compile the program; without a compiler, only say so."""
    # Linked with torch's own OpenMP: the idle threads of a second one would keep the processor busy.
    openmp = Path(torch.__file__).parent.glob("lib/libgomp*")
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder, path.name)
        command = [os.environ.get("CXX", "g++"), str(_SOURCE), *map(str, openmp), *_OPTIONS, "-o", str(built)]
        if shutil.which("nice"):  # what is decoded meanwhile comes first
            command = ["nice", "-n", "19", *command]
        try:
            subprocess.run(command, check=True, capture_output=True, encoding="utf-8", errors="replace")
            with atomic_write(path, "wb") as file:
                file.write(built.read_bytes())
            path.chmod(0o700)  # for a umask that lets the group write
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
