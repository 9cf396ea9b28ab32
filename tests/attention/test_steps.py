"""Every system against the values that the chapters print (four decimals)."""

import runpy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from gpt.attention import (
    CausalAttention,
    MultiHeadAttention,
    MultiHeadAttentionWrapper,
    MultiHeadAttn,
    SelfAttention_v1,
    SelfAttention_v2,
    attention_scores,
    attention_scores_by_loop,
    context_vectors,
    mask_by_infinity,
    mask_by_renormalising,
    normalise_by_sum,
    scores_of_heads,
    softmax_naive,
)
from gpt.attention.kernels import attend

# The inputs and the printed values are written once, in the script that shows them to a reader.
WALKTHROUGH = runpy.run_path(
    str(Path(__file__).parents[2] / "scripts" / "examples" / "attention_walkthrough.py")
)
INPUTS, BATCH, HEADS = (WALKTHROUGH[name] for name in ("INPUTS", "BATCH", "HEADS"))


def same(actual: Tensor, expected: str | Tensor, tolerance: float = 6e-5) -> None:
    """`expected` is a tensor, or the name of a value that the chapters print to four decimals."""
    if isinstance(expected, str):
        numbers = WALKTHROUGH["PRINTED"][expected].replace("/", " ").split()
        expected = torch.tensor([float(number) for number in numbers]).reshape(actual.shape)
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0)


def test_attention_without_weights() -> None:
    scores = attention_scores(INPUTS)
    same(scores[1], "S1 scores of token 2")
    same(attention_scores_by_loop(INPUTS), scores, 1e-6)
    same(normalise_by_sum(scores)[1], "S1 weights of token 2, by sum")
    weights = softmax_naive(scores)
    same(weights[1], "S1 weights of token 2, by softmax")
    same(weights, torch.softmax(scores, dim=-1), 1e-6)
    same(context_vectors(weights, INPUTS)[1], "S1 context vector of token 2")


def test_v1_step_by_step() -> None:
    torch.manual_seed(123)
    system = SelfAttention_v1(3, 2)
    query, key = INPUTS @ system.W_query, INPUTS @ system.W_key
    same(query[1], "S2 query of token 2")
    same(query[1] @ key[1], "S2 score of token 2 with itself")
    same(query[1] @ key.T, "S2 scores of token 2")
    _, weights = attend(query, key, INPUTS @ system.W_value)
    same(weights[1], "S2 weights of token 2")
    same(
        system(INPUTS),
        "S2 context vectors",
    )


def test_v2() -> None:
    torch.manual_seed(789)
    same(
        SelfAttention_v2(3, 2)(INPUTS),
        "S3 context vectors",
    )


def test_v1_with_transposed_weights_of_v2_gives_its_output() -> None:
    torch.manual_seed(789)
    v1, v2 = SelfAttention_v1(3, 2), SelfAttention_v2(3, 2)
    for name in ("W_query", "W_key", "W_value"):
        setattr(v1, name, nn.Parameter(getattr(v2, name).weight.T.contiguous()))
    same(v1(INPUTS), v2(INPUTS), 1e-6)


def test_causal_mask_two_ways() -> None:
    torch.manual_seed(789)
    system = SelfAttention_v2(3, 2)
    query, key = system.W_query(INPUTS), system.W_key(INPUTS)
    scores = query @ key.T / 2**0.5
    by_sum = mask_by_renormalising(torch.softmax(scores, dim=-1))
    by_infinity = torch.softmax(mask_by_infinity(scores), dim=-1)
    for weights in (by_sum, by_infinity):
        same(weights[1, :2], "S4 weights of token 2")
        same(weights[5], "S4 weights of token 6")
        assert (weights.triu(diagonal=1) == 0).all()
    same(by_sum, by_infinity, 1e-6)


def test_causal_attention_is_v2_with_the_mask() -> None:
    torch.manual_seed(123)
    causal, v2 = CausalAttention(3, 2, 6, 0.0), SelfAttention_v2(3, 2)
    out = causal(BATCH)
    assert out.shape == (2, 6, 2)
    v2.load_state_dict({name: value for name, value in causal.state_dict().items() if name != "mask"})
    scores = mask_by_infinity(v2.W_query(INPUTS) @ v2.W_key(INPUTS).T / 2**0.5)
    expected = torch.softmax(scores, dim=-1) @ v2.W_value(INPUTS)
    same(out, torch.stack([expected, expected]), 1e-6)


def test_causal_attention_drops_weights_in_training_only() -> None:
    torch.manual_seed(0)
    system = CausalAttention(3, 2, 6, 0.5)
    assert not torch.equal(system(BATCH), system(BATCH))
    system.eval()
    assert torch.equal(system(BATCH), system(BATCH))


@pytest.mark.parametrize(
    ("system_type", "arguments"),
    [
        (CausalAttention, (3, 2, 8, 0.0)),
        (MultiHeadAttentionWrapper, (3, 2, 8, 0.0, 2)),
        (MultiHeadAttention, (3, 2, 8, 0.0, 2)),
        (MultiHeadAttn, (3, 8, 3)),
    ],
)
@pytest.mark.parametrize("changed", [1, 3, 5])
def test_later_tokens_change_nothing_before_them(system_type, arguments: tuple, changed: int) -> None:
    system = system_type(*arguments)
    other = BATCH.clone()
    other[:, changed:] += 1.0
    before, after = system(BATCH), system(other)
    assert torch.equal(before[:, :changed], after[:, :changed])
    assert not torch.allclose(before[:, changed:], after[:, changed:])


def test_wrapper() -> None:
    torch.manual_seed(123)
    out = MultiHeadAttentionWrapper(3, 2, 6, 0.0, num_heads=2)(BATCH)
    assert out.shape == (2, 6, 4)
    assert torch.equal(out[0], out[1])
    same(
        out[0],
        "S6 two heads of width 2",
    )
    torch.manual_seed(123)
    same(
        MultiHeadAttentionWrapper(3, 1, 6, 0.0, num_heads=2)(BATCH)[1],
        "S6 two heads of width 1",
    )


@pytest.mark.parametrize("need_weights", [False, True])
def test_split(need_weights: bool) -> None:
    torch.manual_seed(123)
    out = MultiHeadAttention(3, 2, 6, 0.0, num_heads=2)(BATCH, need_weights=need_weights)
    out = out[0] if need_weights else out
    for row in out:
        same(
            row,
            "S7 two heads of width 1",
        )


def test_split_at_gpt2_small_prints_five_submodules() -> None:
    system = MultiHeadAttention(768, 768, 1024, 0.0, num_heads=12)
    assert str(system).splitlines() == [
        "MultiHeadAttention(",
        "  (W_query): Linear(in_features=768, out_features=768, bias=False)",
        "  (W_key): Linear(in_features=768, out_features=768, bias=False)",
        "  (W_value): Linear(in_features=768, out_features=768, bias=False)",
        "  (out_proj): Linear(in_features=768, out_features=768, bias=True)",
        "  (dropout): Dropout(p=0.0, inplace=False)",
        ")",
    ]
    assert sum(parameter.numel() for parameter in system.parameters()) == 2_360_064


def test_batched_product_over_heads() -> None:
    scores = scores_of_heads(HEADS, HEADS)
    assert scores.shape == (1, 2, 3, 3)
    same(scores[0, 0, 0], "S8 head 1, token 1", 1.1e-4)  # the values of HEADS are rounded themselves
    same(scores[0, 1, 0], "S8 head 2, token 1", 1.1e-4)
    for head in range(2):
        same(scores[0, head], HEADS[0, head] @ HEADS[0, head].T, 1e-6)


def test_fused_keeps_the_names_of_the_chapter() -> None:
    system = MultiHeadAttn(4, 6, 2)
    assert {name: tuple(value.shape) for name, value in system.state_dict().items()} == {
        "bias": (1, 1, 6, 6),
        "c_attn.weight": (12, 4),
        "c_attn.bias": (12,),
    }
    assert torch.equal(system.bias[0, 0], torch.ones(6, 6).tril())


@pytest.mark.parametrize("qkv_bias", [False, True])
def test_fused_with_the_splits_weights_gives_its_output(qkv_bias: bool) -> None:
    split = MultiHeadAttention(8, 8, 6, 0.0, 4, qkv_bias)
    split.out_proj.weight.data, split.out_proj.bias.data = torch.eye(8), torch.zeros(8)
    fused = MultiHeadAttn(8, 6, 4)
    parts = split.W_query, split.W_key, split.W_value
    fused.c_attn.weight.data = torch.cat([part.weight.data for part in parts])
    biases = [part.bias.data if qkv_bias else torch.zeros(8) for part in parts]
    fused.c_attn.bias.data = torch.cat(biases)
    x = torch.randn(2, 6, 8)
    torch.testing.assert_close(fused(x), split(x))


def test_wrapper_equals_split_with_its_weights() -> None:
    torch.manual_seed(0)
    wrapper = MultiHeadAttentionWrapper(3, 2, 6, 0.0, num_heads=3, qkv_bias=True)
    split = MultiHeadAttention(3, 6, 6, 0.0, num_heads=3, qkv_bias=True)
    for name in ("W_query", "W_key", "W_value"):
        for kind in ("weight", "bias"):
            heads = [getattr(getattr(head, name), kind) for head in wrapper.heads]
            getattr(getattr(split, name), kind).data = torch.cat(heads)
    split.out_proj.weight.data, split.out_proj.bias.data = torch.eye(6), torch.zeros(6)
    same(split(BATCH), wrapper(BATCH), 1e-6)
