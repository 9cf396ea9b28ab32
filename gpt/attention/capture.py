"""Read the attention weights of any model built from `MultiHeadAttention`, without changing it."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import Tensor, nn

from .multi_head import MultiHeadAttention


@contextmanager
def capture_weights(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Yield a dictionary that fills while the model runs: each `MultiHeadAttention`'s name and weights.

    The weights are those of its last call, (batch, heads, queries, keys).
    """
    captured: dict[str, Tensor] = {}
    asked: list[bool] = []  # whether the caller itself asks for the weights, of each call that is running

    def request(
        _: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        asked.append(bool(kwargs.get("need_weights")))
        return args, {**kwargs, "need_weights": True}

    def keep(module: nn.Module, _: object, result: tuple[Tensor, Tensor]) -> Tensor | tuple[Tensor, Tensor]:
        out, weights = result
        captured[names[module]] = weights.detach()
        return result if asked.pop() else out

    names = {module: name for name, module in model.named_modules()}
    with ExitStack() as hooks:
        for module in filter(lambda module: isinstance(module, MultiHeadAttention), names):
            hooks.callback(module.register_forward_pre_hook(request, with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(keep, prepend=True).remove)
        yield captured
