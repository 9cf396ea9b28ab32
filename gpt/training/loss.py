"""Cross-entropy of a large vocabulary without its logits in float32: a chunk of rows at a time.

The logits are the largest tensor of a training step by far: GPT-2 has 50,257 columns for each token. Here a
chunk's logits live, in the type of the products, only until its share of the loss and of the gradients is
known. Between them, softmax and its gradient run over a few rows at a time that stay in a processor's cache.

Shapes: N tokens, D width of a feature, V vocabulary, P the vocabulary padded, C tokens in a chunk, R rows
looked at together.
"""

from typing import Any

import torch
from torch import Tensor

IGNORE = -100  # the target of a padded position, as in torch.nn.functional.cross_entropy
_MULTIPLE = 64  # products are faster, on any device, where the vocabulary is a multiple of so many
_CACHED = 1 << 19  # logits whose softmax, two megabytes in float32, stays in a core's cache


def linear_cross_entropy(features: Tensor, weight: Tensor, targets: Tensor, chunk: int = 1024) -> Tensor:
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
            rows, table = features.to(dtype), _padded(weight, dtype)  # (N, D), (P, D)
            counts = (targets != IGNORE)[:, None]  # (N, 1)
            share = counts / counts.sum()  # (N, 1), of a row in the mean
            weighed_rows = (rows * share).to(dtype)  # (N, D)
            target = targets.clamp(min=0)[:, None]  # (N, 1)
            total = torch.zeros((), dtype=torch.float32, device=features.device)
            features_grad = torch.empty_like(rows) if needs_features else None
            weight_grad = None
            slopes = needs_features or needs_weight
            room = rows.new_empty(min(chunk, len(rows)), len(table))  # (C, P), for each chunk in turn
            for start in range(0, len(rows), chunk):
                part = slice(start, start + chunk)
                logits = torch.mm(rows[part], table.T, out=room[: len(rows[part])])  # (C, P)
                logits[:, len(weight) :] = -torch.inf
                total += (_nats(logits, target[part], slopes) * share[part]).sum()
                if features_grad is not None:
                    torch.mm(logits, table, out=features_grad[part])
                if needs_weight:
                    of_chunk = (logits.T @ weighed_rows[part])[: len(weight)]  # (V, D)
                    if weight_grad is None:
                        weight_grad = of_chunk if chunk >= len(rows) else of_chunk.float()
                    else:
                        weight_grad += of_chunk
            if features_grad is not None:
                features_grad *= share
        ctx.save_for_backward(
            None if features_grad is None else features_grad.to(features.dtype),
            None if weight_grad is None else weight_grad.to(weight.dtype),
        )
        return total

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        slope = slopes[0]
        if not slope.is_cuda and slope == 1:  # on a GPU the question would stall it
            return *ctx.saved_tensors, None, None
        features_grad, weight_grad = (
            None if grad is None else grad * slope.to(grad.dtype) for grad in ctx.saved_tensors
        )
        return features_grad, weight_grad, None, None


def _padded(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy in `dtype` with rows of zeros up to the next multiple of 64: (V, D) -> (P, D)."""
    missing = -len(weight) % _MULTIPLE
    if not missing:
        return weight.to(dtype)
    table = weight.new_empty(len(weight) + missing, weight.shape[1], dtype=dtype)
    table[: len(weight)] = weight
    table[len(weight) :] = 0
    return table


def _nats(logits: Tensor, target: Tensor, slopes: bool) -> Tensor:
    """Cross-entropy (C, 1) of logits (C, P).

    With `slopes` the logits become those of the cross-entropy: softmax(logits) - one_hot(target).
    """
    nats = []
    rows = len(logits) if logits.is_cuda else max(1, _CACHED // logits.shape[1])
    for x, y in zip(torch.split(logits, rows), torch.split(target, rows), strict=True):  # (R, P), (R, 1)
        below = x.gather(1, y).float() - x.amax(dim=1, keepdim=True)  # (R, 1), under the highest logit
        p = torch.softmax(x, dim=1, dtype=torch.float32)  # (R, P)
        nats.append(-(below + p.amax(dim=1, keepdim=True).log()))  # the highest logit's p is 1 / sum(exp)
        if slopes:
            x.copy_(p.scatter_add_(1, y, p.new_full(y.shape, -1.0)))
    return torch.cat(nats)
