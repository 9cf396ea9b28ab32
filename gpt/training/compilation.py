"""When to compile a model, and how, so that its weights keep their names."""

import os
import shutil
import sys
from importlib.util import find_spec

import torch
from lightning.pytorch.utilities import rank_zero_warn

from gpt.model import GPT

# Compiling the blocks takes about twenty seconds. Runs below these sizes save less time than that.
_CPU_FLOPS = 3e14
_GPU_STEPS = 500


def compile_blocks(model: GPT) -> None:
    """Compile the forward pass of each block in place; without a compiler, only say so.

    All blocks share one compilation, so its time does not grow with depth.
    """
    if missing := missing_compiler(next(model.parameters()).device):
        rank_zero_warn(f"not compiled: {missing}. Training is slower without it.")
        return
    torch._dynamo.config.optimize_ddp = False  # DDP reduces one block while another computes: split none
    for block in model.blocks:
        block.compile()


def should_compile(device: torch.device, *, steps: int, tokens_per_step: int, parameters: int) -> bool:
    """Whether a run is long enough to save more time than compilation takes."""
    if device.type == "cuda":
        return steps >= _GPU_STEPS
    return device.type == "cpu" and 6.0 * parameters * tokens_per_step * steps >= _CPU_FLOPS


def missing_compiler(device: torch.device) -> str | None:
    """What is missing to compile for `device`, or None."""
    if sys.version_info >= (3, 15):
        return f"torch.compile does not support Python {sys.version_info.major}.{sys.version_info.minor}"
    if device.type == "cuda" and not find_spec("triton"):
        return "the package triton is not installed"
    language, compilers = "C++", ["cl"] if sys.platform == "win32" else ["g++", "clang++", "c++"]
    if device.type == "cuda":  # Triton builds its launchers with a C compiler
        language, compilers = "C", [os.environ.get("CC", "cc"), "gcc", "clang"]
    missing = f"no {language} compiler found, looked for {', '.join(compilers)}"
    return None if any(map(shutil.which, compilers)) else missing
