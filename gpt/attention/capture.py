"""Read the attention weights of any model built from `MultiHeadAttention`, without changing it.

Shapes: B batch, H heads, T queries, S keys.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from .multi_head import MultiHeadAttention


@contextmanager
def capture_weights(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Inside the block, collect the weights (B, H, T, S) of each `MultiHeadAttention` in `model` by its name.

    The model's output is unchanged. The weights are detached, and those of the last call are kept.
    """
    captured: dict[str, Tensor] = {}

    def request(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, "need_weights": True}

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if isinstance(module, MultiHeadAttention):

                def keep(_: nn.Module, __: Any, result: tuple[Tensor, Tensor], name: str = name) -> Tensor:
                    captured[name] = result[1].detach()
                    return result[0]

                hooks.callback(module.register_forward_pre_hook(request, with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(keep).remove)
        yield captured
