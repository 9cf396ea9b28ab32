"""How to compile a model, so that its weights keep their names."""

import shutil
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn

from gpt.training.loss import cross_entropy

_COMPILERS = ("c++", "g++", "clang++", "cl")


def compile_model(module: Any) -> None:
    """Compile a LanguageModel's blocks in place; without a compiler, only say so.

    All blocks share one compilation, so its time does not grow with depth. What is fused on a GPU beside them
    would make a CPU slower (docs/benchmarks.md).
    """
    if not has_compiler():
        names = ", ".join(_COMPILERS)
        rank_zero_warn(f"not compiled: no compiler found, looked for {names}. Training is slower without it.")
        return
    torch._dynamo.config.optimize_ddp = False  # DDP reduces one block while another computes: split none
    if module.device.type == "cuda":
        module.kernel = torch.compile(cross_entropy)  # softmax and gradient in one pass over the logits
    for block in module.model.blocks:
        block.compile()


def has_compiler() -> bool:
    """Whether there is a compiler for what torch writes."""
    return any(map(shutil.which, _COMPILERS))
