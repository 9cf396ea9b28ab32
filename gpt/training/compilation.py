"""When to compile a model, and how, so that its weights keep their names."""

import os
import shutil
import sys
from importlib.util import find_spec
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn

from gpt.data.module import TokenData
from gpt.training.loss import cross_entropy

# Compiling the blocks takes about twenty seconds, on a GPU up to a hundred. Runs of fewer operations save
# less: a GPU computes about 1e14 in a second where nothing is compiled (an estimate).
_LEAST_FLOPS = {"cpu": 3e14, "cuda": 1e16}


def compile_model(module: Any) -> None:
    """Compile a LanguageModel's blocks in place; without a compiler, only say so.

    All blocks share one compilation, so its time does not grow with depth. What is fused on a GPU beside them
    would make a CPU slower (docs/benchmarks.md).
    """
    device = module.device
    if missing := missing_compiler(device):
        rank_zero_warn(f"not compiled: {missing}. Training is slower without it.")
        return
    torch._dynamo.config.optimize_ddp = False  # DDP reduces one block while another computes: split none
    if device.type == "cuda":
        module.kernel = torch.compile(cross_entropy)  # softmax and gradient in one pass over the logits
    for block in module.model.blocks:
        block.compile()


def should_compile(module: Any) -> bool:
    """Whether a run, with the steps before it is resumed, is so long that compilation saves time."""
    trainer = module.trainer
    data = module.trainer.datamodule
    if module.device.type not in _LEAST_FLOPS or not isinstance(data, TokenData):
        return False
    tokens = data.batch_size * data.context_length * trainer.accumulate_grad_batches * module.planned_steps
    return bool(6.0 * module.model.num_parameters() * tokens >= _LEAST_FLOPS[module.device.type])


def missing_compiler(device: torch.device) -> str | None:
    """What is missing to compile for `device`, or None."""
    compilers = ["cl"] if sys.platform == "win32" else ["g++", "clang++", "c++"]
    if device.type == "cuda":
        if not find_spec("triton"):
            return "the package triton is not installed"
        compilers = [os.environ.get("CC", "cc"), "gcc", "clang"]  # Triton builds its launchers in C
    found = any(map(shutil.which, compilers))
    return None if found else f"no compiler found, looked for {', '.join(compilers)}"
