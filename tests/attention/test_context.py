"""Attention without a causal mask, and over a context, against `torch.nn.MultiheadAttention`."""

import pytest
import torch
from torch import Tensor, nn
from torchs import from_torch

from gpt.attention import MultiHeadAttention
from gpt.errors import InputError

WIDTH, HEADS, QUERIES, KEYS = 12, 3, 5, 7


def theirs(bias: bool = True) -> nn.MultiheadAttention:
    module = nn.MultiheadAttention(WIDTH, HEADS, bias=bias, batch_first=True, dtype=torch.double)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module


def masks(keys: int) -> dict[str, dict[str, Tensor]]:
    padding = torch.zeros(2, keys, dtype=torch.bool)
    padding[0, :2], padding[1, 4:] = True, True
    pairs = torch.rand(QUERIES, keys) < 0.3
    pairs[:, 3] = False  # each query keeps a key: torch's module gives NaN where none is left
    return {
        "none": {},
        "padding": {"key_padding_mask": padding},
        "pairs": {"attn_mask": pairs},
        "both": {"key_padding_mask": padding, "attn_mask": pairs},
    }


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, QUERIES, WIDTH, dtype=torch.double, requires_grad=True)


@pytest.fixture
def context() -> Tensor:
    return torch.randn(2, KEYS, WIDTH, dtype=torch.double, requires_grad=True)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", ["none", "padding", "pairs", "both"])
def test_attention_to_all_tokens_equals_torchs(x: Tensor, name: str, bias: bool) -> None:
    module, given = theirs(bias), masks(QUERIES)[name]
    ours = from_torch(module, QUERIES, causal=False)
    expected, expected_weights = module(x, x, x, average_attn_weights=False, **given)
    out, weights = ours(x, need_weights=True, **given)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(weights, expected_weights)
    torch.testing.assert_close(ours(x, **given), expected)


@pytest.mark.parametrize("name", ["none", "padding", "pairs", "both"])
def test_cross_attention_equals_torchs(x: Tensor, context: Tensor, name: str) -> None:
    module, given = theirs(), masks(KEYS)[name]
    ours = from_torch(module, KEYS, causal=False)
    expected, expected_weights = module(x, context, context, average_attn_weights=False, **given)
    out, weights = ours(x, context=context, need_weights=True, **given)
    assert weights.shape == (2, HEADS, QUERIES, KEYS)
    torch.testing.assert_close(weights, expected_weights)
    gradients = torch.autograd.grad(expected.square().sum(), [x, context])
    for result in (out, ours(x, context=context, **given)):
        torch.testing.assert_close(result, expected)
        torch.testing.assert_close(torch.autograd.grad(result.square().sum(), [x, context]), gradients)


def test_a_query_without_a_key_gives_zeros(x: Tensor, context: Tensor) -> None:
    ours = from_torch(theirs(), KEYS, causal=False)
    pairs = torch.rand(2, QUERIES, KEYS) < 0.4
    pairs[0, 1] = True
    out = ours(x, context=context, attn_mask=pairs)
    assert (out[0, 1] == 0).all() and (out[0, 0] != 0).any()


def test_without_a_mask_it_has_the_state_dict_of_a_causal_one(x: Tensor) -> None:
    module = MultiHeadAttention(WIDTH, WIDTH, QUERIES, 0.0, HEADS, causal=False).double()
    causal = MultiHeadAttention(WIDTH, WIDTH, QUERIES, 0.0, HEADS).double()
    assert module.mask is None
    causal.load_state_dict(module.state_dict())
    assert not torch.allclose(causal(x), module(x))


def test_arguments_that_exclude_each_other_are_refused(x: Tensor, context: Tensor) -> None:
    causal = MultiHeadAttention(WIDTH, WIDTH, KEYS, 0.0, HEADS).double()
    both = MultiHeadAttention(WIDTH, WIDTH, KEYS, 0.0, HEADS, causal=False).double()
    cache = causal.new_cache(2)
    for call, message in {
        lambda: causal(x, context=context): "a context needs attention with causal=False",
        lambda: both.new_cache(2): "a cache needs causal=True",
        lambda: both(x, context=context[:1]): r"a context of shape \(2, tokens, 12\), got \(1, 7, 12\)",
        lambda: both(x, context=context[..., :6]): r"a context of shape \(2, tokens, 12\), got \(2, 7, 6\)",
        lambda: both(x, context=context.repeat(1, 2, 1)): "at most context_length 7 tokens",
        lambda: both(x, context=context, attn_mask=torch.zeros(KEYS, QUERIES, dtype=torch.bool)): (
            r"\(5, 7\) or \(2, 5, 7\) or \(2, 3, 5, 7\), got torch.bool of shape \(7, 5\)"
        ),
    }.items():
        with pytest.raises(InputError, match=message):
            call()
    assert cache.length == 0
