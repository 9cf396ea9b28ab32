"""When to compile a model, and how, so that its weights keep their names."""

import shutil
import sys
from importlib.util import find_spec

import torch
from lightning.pytorch.utilities import rank_zero_warn

from gpt.model import GPT

# Compiling the blocks takes some twenty seconds. A run that is over in minutes on a CPU, or in a few hundred
# steps on a GPU, does not earn them back.
_CPU_FLOPS_THAT_PAY = 3e14
_GPU_STEPS_THAT_PAY = 500


def compile_blocks(model: GPT) -> None:
    """Compile the forward pass of each block in place.

    All blocks share one compilation, so that depth costs no time. In place, the weights' names stay as they
    are: a checkpoint does not tell. Where there is no compiler, one line says so and nothing changes.
    """
    missing = missing_compiler(next(model.parameters()).device)
    if missing:
        rank_zero_warn(f"not compiled: {missing}. Training goes on without, slower.")
        return
    for block in model.blocks:
        block.compile()


def should_compile(device: torch.device, *, steps: int, tokens_per_step: int, parameters: int) -> bool:
    """Whether a run of so many steps is long enough to earn the compilation back."""
    if device.type == "cuda":
        return steps >= _GPU_STEPS_THAT_PAY
    return device.type == "cpu" and 6.0 * parameters * tokens_per_step * steps >= _CPU_FLOPS_THAT_PAY


def missing_compiler(device: torch.device) -> str | None:
    """What is missing to compile for `device`, or None."""
    if sys.version_info >= (3, 15):
        return f"torch.compile does not know Python {sys.version_info.major}.{sys.version_info.minor}"
    if device.type == "cuda":
        return None if find_spec("triton") else "the package triton is not installed"
    compilers = ("cl",) if sys.platform == "win32" else ("g++", "clang++", "c++")
    if not any(shutil.which(name) for name in compilers):
        return f"no C++ compiler found, looked for {', '.join(compilers)}"
    return None
