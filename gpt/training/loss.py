"""Cross-entropy over a large vocabulary, one chunk of rows at a time.

All logits together would be the largest tensor of a training step: GPT-2 has 50,257 for each token. Here only
one chunk's logits exist at a time. Softmax and gradient are computed in float32, over few enough rows to fit
in a CPU's cache.

Shapes: N tokens, D features, V vocabulary, P padded vocabulary, C rows in a chunk, R rows in the cache.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gpt.data.windows import IGNORE_INDEX

_MULTIPLE = 64  # matrix products are faster on all devices if the vocabulary's size is a multiple of this
_CACHED = 1 << 19  # logits: two megabytes in float32, which fit in a core's cache
_LEAST_EXACT = 1e-30  # below that, float32 rounds a probability, in the end to zero
Kernel = Callable[[Tensor, Tensor, bool], Tensor]
"""`losses_in_place`, or a compiled or divided form of it."""
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def is_matrix(head: nn.Module) -> bool:
    """Whether the head only multiplies by its `weight`, without bias, hook or adapter."""
    return (
        type(head) is nn.Linear
        and getattr(head, "bias", None) is None
        and type(head.weight) is nn.Parameter
        and "forward" not in vars(head)
        and not any(getattr(head, hooks) for hooks in _HOOKS)
    )


def head_cross_entropy(
    head: nn.Module, features: Tensor, targets: Tensor, chunk: int | None = None, kernel: Kernel | None = None
) -> Tensor:
    """Return the mean of `cross_entropy(head(features), targets)` in nats; NaN where no position is scored.

    For a head that is only a matrix, `linear_cross_entropy` does the work. Any other head is called chunk by
    chunk, and again in the backward pass, so that the logits of only one chunk are in memory.

    Args:
        head: (..., D) -> (..., V).
        features, targets, chunk, kernel: as for `linear_cross_entropy`.
    """
    if is_matrix(head):
        return linear_cross_entropy(features, head.weight, targets, chunk, kernel)  # type: ignore[arg-type]

    def total(rows: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(head(rows).float(), wanted, ignore_index=IGNORE_INDEX, reduction="sum")

    size = chunk or _chunk_of(features)
    parts = zip(torch.split(features, size), torch.split(targets, size), strict=True)
    totals = [checkpoint(total, rows, wanted, use_reentrant=False) for rows, wanted in parts]
    return torch.stack(totals).sum() / (targets != IGNORE_INDEX).sum()


def linear_cross_entropy(
    features: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk: int | None = None,
    kernel: Kernel | None = None,
    *,
    bias: Tensor | None = None,
) -> Tensor:
    """Return the mean cross-entropy of `features @ weight.T + bias` in nats; NaN if nothing is scored.

    Matrix products use autocast's number type if it is on; all else is in float32. The gradients are computed
    in the forward pass, while the logits exist, and only if gradients are enabled.

    Args:
        features, weight: (N, D) and (V, D).
        targets: (N,) int64 in [0, V), or IGNORE_INDEX for positions that are not scored.
        chunk: rows whose logits exist at the same time, by default 8,192 on a GPU and 1,024 elsewhere.
        kernel: `losses_in_place` compiled for a GPU; by default it runs uncompiled.
        bias: (V,), constants that are added to the logits of each position. They get no gradient.
    """
    if not torch.is_grad_enabled():  # a Function only checks whether its inputs require gradients
        features = features.detach()
        weight = weight.detach()
    return _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        features, weight, targets, bias, chunk or _chunk_of(features), kernel or _divided
    )


def _chunk_of(features: Tensor) -> int:
    """Return the number of rows whose logits are in memory at the same time."""
    return 8192 if features.is_cuda else 1024


class _LinearCrossEntropy(torch.autograd.Function):
    # For mypy `ctx` is Any, as in torch: what it carries has no declared types.

    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        weight: Tensor,
        targets: Tensor,
        bias: Tensor | None,
        chunk: int,
        kernel: Kernel,
    ) -> Tensor:
        device = features.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else features.dtype
        needs_features, needs_weight = ctx.needs_input_grad[:2]
        with torch.autocast(device, enabled=False):
            rows = features.to(dtype)  # (N, D)
            table = weight.to(dtype)  # (V, D)
            if padding := -len(weight) % _MULTIPLE:
                table = F.pad(table, (0, 0, 0, padding))  # (P, D)
            if bias is not None:
                bias = F.pad(bias.to(dtype), (0, padding))  # (P,)
            row_weights, unit = _row_weights(targets, dtype)
            weighted_rows = (rows * row_weights).to(dtype)  # (N, D)
            target = targets.clamp(min=0)[:, None]  # (N, 1)
            total = torch.zeros((), dtype=torch.float32, device=features.device)
            features_grad = torch.empty_like(rows) if needs_features else None
            weight_grad = None
            logits_buffer = rows.new_empty(min(chunk, len(rows)), len(table))  # (C, P)
            for start in range(0, len(rows), chunk):
                part = slice(start, start + chunk)
                logits = logits_buffer[: len(rows[part])]  # (C, P)
                if bias is None:
                    torch.mm(rows[part], table.T, out=logits)
                else:
                    torch.addmm(bias, rows[part], table.T, out=logits)
                logits[:, len(weight) :] = -torch.inf
                losses = kernel(logits, target[part], needs_features or needs_weight)
                total += (losses * row_weights[part]).sum()
                gradients = logits  # the kernel has overwritten the logits with them
                if features_grad is not None:
                    torch.mm(gradients, table, out=features_grad[part]).mul_(row_weights[part])
                if needs_weight:
                    chunk_grad = (gradients.T @ weighted_rows[part])[: len(weight)]  # (V, D)
                    if weight_grad is not None:
                        weight_grad += chunk_grad
                    else:
                        # Several chunks are added in float32; a single one needs no wider type.
                        weight_grad = chunk_grad if chunk >= len(rows) else chunk_grad.float()
        if features_grad is not None:
            features_grad = features_grad.to(features.dtype)
        if weight_grad is not None:
            weight_grad = weight_grad.to(weight.dtype)
        ctx.save_for_backward(features_grad, weight_grad)
        ctx.unit = unit
        return total / unit

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        scale = gradients[0] / ctx.unit
        features_grad, weight_grad = ctx.saved_tensors
        if features_grad is not None:
            features_grad = features_grad * scale.to(features_grad.dtype)
        if weight_grad is not None:
            weight_grad = weight_grad * scale.to(weight_grad.dtype)
        return features_grad, weight_grad, None, None, None, None


def _row_weights(targets: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | float]:
    """Return the weight of each row in the mean times a unit, (N, 1), and the unit, which divides the result.

    Without it, the gradients of a mean over many rows would be too small for float16.
    """
    scored = (targets != IGNORE_INDEX)[:, None]  # (N, 1)
    count = scored.sum()
    unit = count / 64 if dtype == torch.float16 else 1.0
    return scored.float() * unit / count, unit


def losses_in_place(logits: Tensor, targets: Tensor, differentiate: bool) -> Tensor:
    """Compute the cross-entropy of each row, (R, 1), of logits (R, P) and targets (R, 1).

    With `differentiate`, the logits are overwritten with the gradient, which is softmax - one-hot.
    """
    p = torch.softmax(logits, dim=1, dtype=torch.float32)  # (R, P)
    losses = _losses(logits, p, targets)
    if differentiate and torch.compiler.is_compiling():  # in the same pass, as a scatter is not
        ids = torch.arange(logits.shape[1], device=logits.device)  # (P,)
        logits.copy_(p - (ids == targets).float())
    elif differentiate:
        logits.copy_(p.scatter_add_(1, targets, p.new_full(targets.shape, -1.0)))
    return losses


def _losses(logits: Tensor, p: Tensor, targets: Tensor) -> Tensor:
    """Return -log p of the targets: logits (R, P), their softmax p (R, P), targets (R, 1) -> (R, 1)."""
    if logits.device.type == "cpu":
        likelihood = p.gather(1, targets)
        if float(likelihood.min()) > _LEAST_EXACT:
            return -likelihood.log()
    highest = logits.amax(dim=1, keepdim=True)  # (R, 1)
    below = logits.gather(1, targets).float() - highest  # (R, 1)
    return -(below + p.amax(dim=1, keepdim=True).log())  # the highest p is 1 / sum(exp)


def _divided(logits: Tensor, targets: Tensor, differentiate: bool) -> Tensor:
    """Compute `losses_in_place` of a chunk (C, P); on a CPU, as many rows at a time as fit in its cache."""
    size = max(1, _CACHED // logits.shape[1]) if logits.device.type == "cpu" else len(logits)
    parts = zip(torch.split(logits, size), torch.split(targets, size), strict=True)
    return torch.cat([losses_in_place(rows, wanted, differentiate) for rows, wanted in parts])
