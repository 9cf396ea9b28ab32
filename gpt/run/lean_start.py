"""Lightning without the libraries that it loads for their names alone: seconds of every start."""

import inspect
import sys
from types import ModuleType
from typing import Any


def load_lightning() -> None:
    """Import Lightning, but not torch's compiler, nor the packages that some of torchmetrics' scores need.

    A program that has imported Lightning or torchmetrics is left as it is. All can be imported later.
    """
    if {"lightning", "torchmetrics", "torch._dynamo"} & sys.modules.keys():
        return
    from lightning_utilities.core.imports import RequirementCache
    from torch.optim import Optimizer

    requirements: Any = RequirementCache
    has = requirements.__bool__
    # Lightning asks whether a model is one that torch.compile returns. There is none before `fit` begins.
    compiler: Any = ModuleType("torch._dynamo")
    compiler.OptimizedModule = type("OptimizedModule", (), {})
    compiler.disable = lambda function, *_, **__: function
    try:
        requirements.__bool__ = lambda wanted: has(wanted) and str(wanted.requirement).startswith("torch>")
        import torchmetrics  # noqa: F401 - its core, which needs neither transformers nor matplotlib

        requirements.__bool__ = has
        sys.modules["torch._dynamo"] = compiler
        import lightning.pytorch.cli  # noqa: F401
    finally:
        requirements.__bool__ = has
        if sys.modules.get("torch._dynamo") is compiler:
            del sys.modules["torch._dynamo"]
    # Optimizers load the compiler to be left out by it. Nothing here compiles an optimizer.
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        method = inspect.unwrap(getattr(Optimizer, name))
        vars(method)["__dynamo_disable"] = method
