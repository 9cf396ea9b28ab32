import pytest
import torch
from torch import nn

from gpt.attention import MultiHeadAttention, MultiHeadAttn, from_fused, from_torch, to_fused, to_torch
from gpt.errors import InputError

X = torch.linspace(-1, 1, 2 * 6 * 8, dtype=torch.double).sin().view(2, 6, 8)


@pytest.mark.parametrize("bias", [False, True])
def test_from_torch(bias: bool) -> None:
    theirs = nn.MultiheadAttention(8, 2, bias=bias, batch_first=True, dtype=torch.double)
    if bias:  # zeros at first, which would hide a wrong order
        nn.init.normal_(theirs.in_proj_bias)
        nn.init.normal_(theirs.out_proj.bias)
    ours = from_torch(theirs, context_length=7)
    expected, _ = theirs(X, X, X, attn_mask=ours.mask[:6, :6])
    torch.testing.assert_close(ours(X), expected)
    assert (ours.W_query.bias is not None) == bias


@pytest.mark.parametrize("qkv_bias", [False, True])
def test_to_torch_and_back(qkv_bias: bool) -> None:
    ours = MultiHeadAttention(8, 8, 6, 0.25, 4, qkv_bias).double().eval()
    theirs = to_torch(ours).eval()
    out, weights = theirs(X, X, X, attn_mask=ours.mask, average_attn_weights=False)
    expected, expected_weights = ours(X, need_weights=True)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(weights, expected_weights)
    assert theirs.dropout == 0.25
    torch.testing.assert_close(from_torch(theirs, 6).eval()(X), expected)


@pytest.mark.parametrize("extra", [{"kdim": 4}, {"add_bias_kv": True}, {"add_zero_attn": True}])
def test_options_that_only_torchs_module_has_are_refused(extra: dict) -> None:
    with pytest.raises(InputError, match="without kdim"):
        from_torch(nn.MultiheadAttention(8, 2, **extra), 6)


def test_from_fused() -> None:
    fused = MultiHeadAttn(8, 6, 2).double()
    ours = from_fused(fused)
    torch.testing.assert_close(ours(X), fused(X))
    assert ours.mask.shape == (6, 6)


@pytest.mark.parametrize("qkv_bias", [False, True])
def test_to_fused_gives_what_goes_into_the_output_projection(qkv_bias: bool) -> None:
    ours = MultiHeadAttention(8, 8, 6, 0.0, 4, qkv_bias).double()
    torch.testing.assert_close(ours.out_proj(to_fused(ours)(X)), ours(X))


def test_fused_with_the_splits_weights_gives_its_output() -> None:
    ours = MultiHeadAttention(8, 8, 6, 0.0, 4).double()
    ours.out_proj.weight.data, ours.out_proj.bias.data = torch.eye(8).double(), torch.zeros(8).double()
    torch.testing.assert_close(to_fused(ours)(X), ours(X))


@pytest.mark.parametrize("convert", [to_torch, to_fused])
def test_another_width_out_than_in_is_refused(convert) -> None:
    with pytest.raises(InputError, match="d_in equal to d_out, got 6 and 8"):
        convert(MultiHeadAttention(6, 8, 6, 0.0, 2))


@pytest.mark.parametrize("training", [True, False])
def test_what_is_in_evaluation_stays_there(training: bool) -> None:
    """Or else dropout would change what it computes."""
    theirs = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True).double().train(training)
    ours = from_torch(theirs, 6, causal=False)
    back = to_torch(ours)
    assert (ours.training, back.training) == (training, training)
    if not training:
        torch.testing.assert_close(ours(X), theirs(X, X, X)[0])
        torch.testing.assert_close(back(X, X, X)[0], ours(X))


def test_copies_do_not_share_memory() -> None:
    ours = MultiHeadAttention(8, 8, 6, 0.0, 2)
    for converted in (from_torch(to_torch(ours), 6), from_fused(to_fused(ours))):
        converted.W_query.weight.data.zero_()
    assert ours.W_query.weight.abs().sum() > 0
