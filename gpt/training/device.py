"""What suits a device and its memory."""

import ctypes
import platform
import re
import sys
import timeit
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

# Numbers of malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4


def default_precision(accelerator: str | Any) -> str:
    """bf16-mixed where bfloat16 matrix products are fast, 16-mixed on older GPUs, else 32-true."""
    if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        return "bf16-mixed" if torch.cuda.is_bf16_supported(including_emulation=False) else "16-mixed"
    on_cpu = accelerator == "cpu" or (accelerator == "auto" and not torch.backends.mps.is_available())
    return "bf16-mixed" if on_cpu and cpu_multiplies_bfloat16() else "32-true"


@cache  # a process decides once: what a plan was timed in is what its run is trained in
def cpu_multiplies_bfloat16() -> bool:
    """Whether the processor multiplies matrices faster in bfloat16 than in float32.

    AVX-512's instructions for it are no proof: products were 3.4 times as fast on an AMD EPYC and half as
    fast on an Intel Xeon, so they are timed.
    """
    if torch.cpu._is_amx_tile_supported():
        return True
    return torch.cpu._is_avx512_bf16_supported() and _seconds(torch.bfloat16) < 0.8 * _seconds(torch.float32)


def _seconds(dtype: torch.dtype) -> float:
    """The shortest time of a few matrix products, which other programs disturb least."""
    matrix = torch.ones(512, 512, dtype=dtype)
    return min(timeit.repeat(lambda: matrix @ matrix, number=1, repeat=6))


def keep_freed_memory() -> None:
    """Have glibc, where there is one, keep the memory of freed tensors for the next ones.

    By default it returns every large block to the system at once, which clears each page anew when it is
    touched: a good part of a GPT-2 step on a CPU (docs/benchmarks.md).
    """
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another C library
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(_M_MMAP_MAX, 0)  # large blocks come from the heap, not from mmap
            mallopt(_M_TRIM_THRESHOLD, -1)  # and the heap is never trimmed


def device_name(device: torch.device) -> str:
    """That of the processor or of the GPU, as far as the system tells it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with suppress(OSError):
        if found := re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text("utf-8")):
            return found[1]
    return platform.processor() or platform.machine()


def free_memory(device: torch.device) -> float:
    """Most of the bytes that are free on the device; infinite where the system does not say."""
    if device.type == "cuda":
        return 0.9 * torch.cuda.mem_get_info(device)[0]
    with suppress(OSError):  # what holds files to read them again is free too
        if found := re.search(r"MemAvailable: +(\d+)", Path("/proc/meminfo").read_text("utf-8")):
            return 0.7 * 1024 * int(found[1])
    return float("inf")
