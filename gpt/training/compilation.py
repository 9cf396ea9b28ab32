"""Compile a model in place, so that its weights keep their names."""

import os
import shutil
import sys
from typing import TYPE_CHECKING

import torch
from lightning.pytorch.utilities import rank_zero_warn

from gpt.training.loss import losses_in_place

if TYPE_CHECKING:
    from gpt.training.module import LanguageModel


def compile_model(module: "LanguageModel") -> None:
    """Compile a model's blocks in place; without a compiler, only print a notice.

    All blocks share one compilation, so its time does not grow with depth. On a GPU the loss is compiled too;
    on a CPU that would be slower (docs/log/step.md).
    """
    if not has_compiler():
        how = "install it, or name another with CXX"
        rank_zero_warn(f"not compiled: there is no compiler {_compiler()}: {how}. Training is slower now.")
        return
    torch._dynamo.config.optimize_ddp = False  # blocks are compiled one by one, so DDP needs no split
    if module.device.type == "cuda":
        module.kernel = torch.compile(losses_in_place)  # one pass over the logits for softmax and gradient
    for block in module.model.blocks:
        block.compile()


def has_compiler() -> bool:
    """Whether the compiler is installed that torch calls for the code that it generates."""
    return shutil.which(_compiler()) is not None


def _compiler() -> str:
    usual = {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
    return os.environ.get("CXX", usual)
