"""A process of its own each, since the C library is told once for all."""

import subprocess
import sys

import pytest

CODE = """
import resource, sys, torch
from pathlib import Path
from gpt.training.device import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()

def resident():
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * resource.getpagesize()

before = resident()
block = torch.ones(1 << 24)
del block
print(resident() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="what glibc does")
def test_freed_memory_is_kept_where_that_is_asked_for():
    grown = {
        how: int(subprocess.run([sys.executable, "-c", CODE, how], capture_output=True, check=True).stdout)
        for how in ("keep", "default")
    }
    assert grown["keep"] > 60_000_000  # of 67
    assert grown["default"] < 30_000_000
