"""The kernels of `attention`: each beside the written-out formula, and what dropout does to its weights."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gpt.attention.kernels import attend, attend_in_blocks, attention, causal_mask


@pytest.mark.parametrize("block", [10, 3], ids=["one block", "blocks of 3"])
def test_blocks_equal_the_written_out_formula(block: int) -> None:
    shape = (2, 3, 10, 4)
    inputs = [torch.randn(shape, dtype=torch.double, requires_grad=True) for _ in range(3)]
    mask, gradient = causal_mask(10), torch.randn(shape, dtype=torch.double)

    expected, _ = attend(*inputs, mask)
    out = attend_in_blocks(*inputs, mask, 0.0, block)

    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(
        torch.autograd.grad(out, inputs, gradient), torch.autograd.grad(expected, inputs, gradient)
    )


LATER = causal_mask(4)
KERNELS = {
    "fused": lambda *qkv: attention(*qkv, LATER, None, 0.25, False).context,
    "fused with a mask": lambda *qkv: attention(*qkv, None, LATER, 0.25, False).context,
    "written out": lambda *qkv: attention(*qkv, LATER, None, 0.25, True).context,
    "returned weights": lambda *qkv: attention(*qkv, LATER, None, 0.25, True).weights,
    "blocks": lambda *qkv: attend_in_blocks(*qkv, LATER, 0.25, block=2),
}


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_every_kernel_drops_a_quarter_of_the_weights_and_scales_the_rest(
    kernel: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> None:
    # With equal scores, token t weighs itself and those before it equally.
    query, key = torch.zeros(2, 3000, 2, 4, 8).unbind()
    value = torch.eye(4).expand(3000, 2, 4, 4)  # so that the context vectors are the weights
    undropped = torch.ones(4, 4).tril() / torch.arange(1, 5)[:, None]

    weights = kernel(query, key, value)

    kept = weights != 0
    torch.testing.assert_close(weights, (undropped / 0.75).expand_as(weights) * kept)
    assert (kept.float().mean((0, 1))[undropped > 0] - 0.75).abs().max() < 0.04
