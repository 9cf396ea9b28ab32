import pytest
import torch

from gpt.attention import MultiHeadAttention
from gpt.attention.blocks import attend_in_blocks
from gpt.attention.kernels import attend, attention, causal_mask


@pytest.mark.parametrize("block", [None, 3])
def test_blocks_equal_the_written_out_formula(block: int | None) -> None:
    shape = (2, 3, 10, 4)
    inputs = [torch.randn(shape, dtype=torch.double, requires_grad=True) for _ in range(3)]
    mask, gradient = causal_mask(10), torch.randn(shape, dtype=torch.double)
    expected, _ = attend(*inputs, mask)
    out = attend_in_blocks(*inputs, mask, block=block)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(
        torch.autograd.grad(out, inputs, gradient), torch.autograd.grad(expected, inputs, gradient)
    )


def test_blocks_drop_weights_and_scale_the_rest() -> None:
    # With equal scores, token t weighs itself and those before it equally.
    query, key = torch.zeros(2, 3000, 2, 4, 8).unbind()
    value = torch.eye(4).expand(3000, 2, 4, 4)
    weights = attend_in_blocks(query, key, value, causal_mask(4), dropout_p=0.25, block=2)
    full = torch.ones(4, 4).tril() / torch.arange(1, 5)[:, None]
    assert torch.isclose(weights, torch.zeros(())).logical_or(torch.isclose(weights, full / 0.75)).all()
    assert ((weights != 0).float().mean((0, 1))[full > 0] - 0.75).abs().max() < 0.04


@pytest.mark.parametrize("masked", [None, torch.zeros(4, 4, dtype=torch.bool)])
@pytest.mark.parametrize("need_weights", [False, True])
def test_weights_are_dropped_by_every_kernel(masked: torch.Tensor | None, need_weights: bool) -> None:
    query, key = torch.zeros(2, 3000, 2, 4, 8).unbind()
    value = torch.eye(4).expand(3000, 2, 4, 4)
    weights, _, _ = attention(query, key, value, None, masked, 0.25, need_weights)
    kept = weights != 0
    assert torch.allclose(weights[kept], torch.tensor(1 / 3))  # 1/4, scaled by 1 / 0.75
    assert abs(kept.float().mean() - 0.75) < 0.01


@pytest.mark.parametrize("tokens", [1, 255, 300, 1024])
def test_bfloat16_on_a_cpu_is_near_single_precision_at_any_length(tokens: int) -> None:
    module = MultiHeadAttention(16, 16, 1024, 0.0, 2, qkv_bias=True)
    x = torch.randn(2, tokens, 16, requires_grad=True)
    expected = module(x)
    expected_gradient = torch.autograd.grad(expected.square().sum(), x)[0]
    with torch.autocast("cpu", torch.bfloat16):
        out = module(x)
    torch.testing.assert_close(out.float(), expected, atol=1e-2, rtol=2e-2)
    gradient = torch.autograd.grad(out.float().square().sum(), x)[0]
    assert (gradient - expected_gradient).norm() / expected_gradient.norm() < 0.02
