"""Settings that suit a device and its memory."""

import ctypes
import platform
import re
import sys
import timeit
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Literal

import torch

from gpt import cgroups
from gpt.errors import InputError

Precision = Literal["32-true", "bf16-mixed", "16-mixed"]
"""Number types that a run computes in, by their names in a Trainer."""
# Constants from malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4


def default_precision(accelerator: str) -> Precision:
    """Return bf16-mixed where bfloat16 matrix products are fast, 16-mixed on older GPUs, else 32-true."""
    if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        return "bf16-mixed" if torch.cuda.is_bf16_supported(including_emulation=False) else "16-mixed"
    on_cpu = accelerator == "cpu" or (accelerator == "auto" and not torch.backends.mps.is_available())
    return "bf16-mixed" if on_cpu and cpu_multiplies_bfloat16() else "32-true"


def choose_precision(accelerator: str, given: Precision | None) -> Precision:
    """Return the precision that is given, or else what suits the device; InputError for float16 on a CPU."""
    if given is None:
        return default_precision(accelerator)
    if given == "16-mixed" and (accelerator == "cpu" or not _has_gpu()):
        raise InputError("--trainer.precision 16-mixed needs a GPU: give bf16-mixed or 32-true")
    return given


def _has_gpu() -> bool:
    return torch.cuda.is_available() or torch.backends.mps.is_available()


@cache  # decided once, so that a run trains in the precision that its plan was timed in
def cpu_multiplies_bfloat16() -> bool:
    """Whether the CPU multiplies matrices faster in bfloat16 than in float32.

    A quick timing decides, because the presence of AVX-512's instructions does not: with them, products were
    3.4 times as fast on an AMD EPYC but half as fast on an Intel Xeon.
    """
    if torch.cpu._is_amx_tile_supported():
        return True
    return torch.cpu._is_avx512_bf16_supported() and _seconds(torch.bfloat16) < 0.8 * _seconds(torch.float32)


def _seconds(dtype: torch.dtype) -> float:
    """Time a few matrix products; return the shortest time, which other programs disturb least."""
    matrix = torch.ones(512, 512, dtype=dtype)
    return min(timeit.repeat(lambda: matrix @ matrix, number=1, repeat=6))


def keep_freed_memory() -> None:
    """Make glibc keep the memory of freed tensors for later ones; do nothing with another C library.

    By default glibc returns every large block to the system at once. The system then has to clear each page
    when it is used again, which takes a good part of a GPT-2 step on a CPU (docs/log/step.md).
    """
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # it is another C library
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(_M_MMAP_MAX, 0)  # large blocks come from the heap, not from mmap
            mallopt(_M_TRIM_THRESHOLD, -1)  # and the heap is never trimmed


def device_name(device: torch.device) -> str:
    """Return the name of the CPU or GPU, as far as the system tells it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with suppress(OSError):
        if match := re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text("utf-8")):
            return match[1]
    return platform.processor() or platform.machine()


def free_memory(device: torch.device, processes: int = 1) -> float:
    """Return the bytes that each process may use: most of those free on the device; inf if unknown.

    Processes on a CPU share its memory. A container's limit counts.
    """
    if device.type == "cuda":
        return 0.9 * torch.cuda.mem_get_info(device)[0]
    free = cgroups.free_memory()
    with suppress(OSError):  # MemAvailable includes the file cache, which can be freed
        if match := re.search(r"MemAvailable: +(\d+)", Path("/proc/meminfo").read_text("utf-8")):
            free = min(free, 1024 * int(match[1]))
    return 0.7 * free / processes
