"""Cross-entropy of a large vocabulary without its logits: a chunk of rows at a time.

The logits are the largest tensor of a training step by far: GPT-2 has 50,257 columns for each token, in
float32. Here a chunk's logits live only until its share of the loss and of the gradients is known, in cache
where they fit, so that nothing of their size is written to memory or kept for the backward pass.

Shapes: N tokens, D width of a feature, V vocabulary, C tokens in a chunk.
"""

from typing import Any

import torch
from torch import Tensor

IGNORE = -100  # the target of a padded position, as in torch.nn.functional.cross_entropy


def linear_cross_entropy(features: Tensor, weight: Tensor, targets: Tensor, chunk: int = 256) -> Tensor:
    """The mean of `cross_entropy(features @ weight.T, targets)`, and its gradients, chunk by chunk.

    Products are computed in autocast's type where it is on, all else in float32. The gradients are computed
    in the forward pass, when the logits are at hand.

    Args:
        features: (N, D).
        weight: (V, D).
        targets: (N,) int64 in [0, V), or -100 for a position that does not count.
        chunk: rows whose logits exist at the same time.

    Returns:
        The mean over positions that count, in nats; NaN where there is none.
    """
    loss: Tensor = _LinearCrossEntropy.apply(features, weight, targets, chunk)  # type: ignore[no-untyped-call]
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
        device = features.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else features.dtype
        needs_features, needs_weight = ctx.needs_input_grad[:2]
        with torch.autocast(device, enabled=False):
            rows, table = features.to(dtype), weight.to(dtype)  # (N, D), (V, D)
            features_grad = torch.empty_like(rows) if needs_features else None
            weight_grad = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
            counts = (targets != IGNORE)[:, None]  # (N, 1)
            counted_rows = rows * counts  # (N, D), what a position that does not count adds to is zero
            total = torch.zeros((), dtype=torch.float32, device=features.device)
            for start in range(0, len(rows), chunk):
                part = slice(start, start + chunk)
                target = targets[part, None].clamp(min=0)  # (C, 1)
                log_p = torch.log_softmax(rows[part] @ table.T, dim=-1, dtype=torch.float32)  # (C, V)
                total -= (log_p.gather(1, target) * counts[part]).sum()
                if not (needs_features or needs_weight):
                    continue
                # d loss / d logits = softmax(logits) - one_hot(target)
                slope = log_p.exp_().scatter_add_(1, target, -torch.ones_like(target, dtype=log_p.dtype))
                slope = slope.to(dtype)  # (C, V)
                if features_grad is not None:
                    torch.mm(slope, table, out=features_grad[part])
                if weight_grad is not None:
                    weight_grad += slope.T @ counted_rows[part]
            if features_grad is not None:
                features_grad *= counts
            count = counts.sum()
        ctx.save_for_backward(features_grad, weight_grad, count)
        ctx.dtypes = features.dtype, weight.dtype
        return total / count

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        *saved, count = ctx.saved_tensors
        scale = slopes[0] / count
        grads = [
            None if grad is None else (grad * scale).to(dtype)
            for grad, dtype in zip(saved, ctx.dtypes, strict=True)
        ]
        return grads[0], grads[1], None, None
