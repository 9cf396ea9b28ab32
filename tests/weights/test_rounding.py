"""Matrices in int8 and int4: how far they are from what they were, and what a rounded model shares."""

import pytest
import torch

from gpt import GPT, GPTConfig
from gpt.errors import InputError
from gpt.weights.rounding import GROUP, in_precision, to_int4, to_int8


def test_int8_weights_are_within_half_a_step():
    """Also of rows of zeros, and of weights that are stored transposed, as transformers' are."""
    weight = torch.randn(64, 48).T
    weight[1] = 0
    levels, scale = to_int8(weight)
    assert (levels.float() * scale[:, None] - weight).abs().le(scale[:, None] / 2 * 1.001).all()
    assert levels.dtype == torch.int8 and levels.abs().amax() == 127 and levels.is_contiguous()


def test_an_int4_weight_is_the_nearest_multiple_of_its_groups_step():
    weight = torch.randn(96, 48).T
    weight[1] = 0
    matrix = to_int4(weight)
    assert (matrix.levels.min(), matrix.levels.max()) == (-8, 7)
    steps = (matrix.steps * matrix.scale[:, None]).repeat_interleave(GROUP, dim=1)
    possible = steps[..., None] * torch.arange(-8, 8)  # (O, I, 16)
    values = possible.gather(2, matrix.levels[..., None].long() + 8)[..., 0]
    torch.testing.assert_close(matrix.values(), values)
    nearest = (possible - weight[..., None]).abs().amin(dim=2)
    torch.testing.assert_close((values - weight).abs(), nearest)


def test_an_int4_step_is_nearly_the_best():
    """Beside all steps that a group could have in float32: the squared error is at most 16 % larger."""
    weight = torch.randn(32, 64)
    groups = weight.view(-1, GROUP, 1)
    steps = groups.abs().amax(1, keepdim=True) / torch.cat([torch.linspace(5, 12, 200)] * 2)
    steps[..., 200:] *= -1
    errors = ((groups / steps).round().clamp(-8, 7) * steps - groups).square().sum(1)
    least = errors.amin(1).sum()
    assert least < (to_int4(weight).values() - weight).square().sum() < 1.16 * least


def test_int4_needs_whole_groups():
    with pytest.raises(InputError, match="a width that 32 divides, not 48"):
        to_int4(torch.ones(4, 48))


@pytest.mark.parametrize("rounding", ["int8", "int4"])
def test_a_rounded_model_has_other_matrices_and_shares_all_else(rounding):
    """With tied embeddings only the head is rounded, and always to int8."""
    model = GPT(GPTConfig(vocab_size=50, context_length=16, emb_dim=32, num_heads=2, num_layers=1))
    before = {name: values.clone() for name, values in model.state_dict().items()}
    rounded = in_precision(model, rounding)
    after = rounded.state_dict()
    blocks = to_int8 if rounding == "int8" else to_int4
    for name, values in model.state_dict().items():
        assert torch.equal(values, before[name])
        if "embedding" in name or values.dim() == 1:
            assert after[name].data_ptr() == values.data_ptr()
        else:
            expected = (to_int8 if name == "head.weight" else blocks)(values).values()
            assert torch.equal(after[name], expected)
    assert in_precision(model, None) is model
