"""Reading the attention weights of any model built from `MultiHeadAttention`, without changing it.

Shapes: B batch, H heads, T queries, S keys.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from gpt.attention.multi_head import MultiHeadAttention


@contextmanager
def capture_weights(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """While the block runs, each `MultiHeadAttention` in `model` leaves its weights (B, H, T, S) by its name.

    The model computes what it computes otherwise. The weights are detached, and those of the last call stay.
    """
    captured: dict[str, Tensor] = {}

    def ask(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, "need_weights": True}

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if isinstance(module, MultiHeadAttention):

                def keep(_: nn.Module, __: Any, result: tuple[Tensor, Tensor], name: str = name) -> Tensor:
                    captured[name] = result[1].detach()
                    return result[0]

                for hook in (
                    module.register_forward_pre_hook(ask, with_kwargs=True),
                    module.register_forward_hook(keep),
                ):
                    hooks.callback(hook.remove)
        yield captured
