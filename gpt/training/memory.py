"""What a process does with memory that is free again."""

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # numbers of malloc.h


def keep_freed_memory() -> None:
    """Have the C library keep what tensors gave back for the next ones, instead of giving it to the system.

    A training step frees and takes again gigabytes. By default glibc returns every large block at once, and
    the system clears each page anew when it is touched: a good part of a GPT-2 step on a CPU
    (docs/benchmarks.md). Where there is no glibc, nothing changes.
    """
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return
    mallopt(_M_MMAP_MAX, 0)  # large blocks come from the heap, which is kept, and not from mmap, which is not
    mallopt(_M_TRIM_THRESHOLD, -1)  # never trim it
