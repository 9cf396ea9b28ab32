"""The chapters' systems: the values that they print, and what they say of one another."""

import runpy
import sys
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
    mask_by_infinity,
    mask_by_renormalising,
    scores_of_heads,
    softmax_naive,
)

SCRIPT = Path(__file__).parents[2] / "scripts" / "examples" / "attention_walkthrough.py"
WALKTHROUGH = runpy.run_path(str(SCRIPT))
INPUTS, BATCH, HEADS = (WALKTHROUGH[name] for name in ("INPUTS", "BATCH", "HEADS"))
PROJECTIONS = "W_query", "W_key", "W_value"


def same(actual: Tensor, expected: Tensor, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0)


def without_projection(split: MultiHeadAttention) -> MultiHeadAttention:
    split.out_proj.weight.data, split.out_proj.bias.data = torch.eye(split.d_out), torch.zeros(split.d_out)
    return split


def test_all_systems_give_the_printed_values(tmp_path: Path, monkeypatch, capsys) -> None:
    """The walkthrough computes them and shows them beside the chapters'."""
    found = {}
    shared = WALKTHROUGH["main"].__globals__
    monkeypatch.setitem(shared, "compare", lambda name, value: found.update({name: value.detach()}))
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--output", str(tmp_path / "pictures")])
    WALKTHROUGH["main"]()
    systems = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line[:1] == "S"]
    assert systems == [f"S{number}" for number in range(1, 11)]
    assert found.keys() == WALKTHROUGH["PRINTED"].keys()
    for name, printed in WALKTHROUGH["PRINTED"].items():
        numbers = torch.tensor([float(number) for number in printed.replace("/", " ").split()])
        # S8 starts from printed, rounded values.
        same(found[name].flatten(), numbers, 1.1e-4 if name.startswith("S8") else 6e-5)
    assert [path.name for path in (tmp_path / "pictures").iterdir()] == ["steps.png"]


def test_loops_products_and_both_softmaxes_agree() -> None:
    scores = attention_scores(INPUTS)
    same(attention_scores_by_loop(INPUTS), scores)
    same(softmax_naive(scores), torch.softmax(scores, dim=-1))
    for head, product in zip(HEADS[0], scores_of_heads(HEADS, HEADS)[0], strict=True):
        same(product, head @ head.T)


def test_v1_with_transposed_weights_of_v2_gives_its_output() -> None:
    v1, v2 = SelfAttention_v1(3, 2), SelfAttention_v2(3, 2)
    for name in PROJECTIONS:
        setattr(v1, name, nn.Parameter(getattr(v2, name).weight.T.contiguous()))
    same(v1(INPUTS), v2(INPUTS))


def test_the_causal_mask_two_ways_and_in_a_module() -> None:
    causal, v2 = CausalAttention(3, 2, 6, 0.0), SelfAttention_v2(3, 2)
    v2.load_state_dict({name: value for name, value in causal.state_dict().items() if name != "mask"})
    scores = v2.W_query(INPUTS) @ v2.W_key(INPUTS).T / 2**0.5
    weights = torch.softmax(mask_by_infinity(scores), dim=-1)
    same(mask_by_renormalising(torch.softmax(scores, dim=-1)), weights)
    assert (weights.triu(diagonal=1) == 0).all()
    same(causal(BATCH), (weights @ v2.W_value(INPUTS)).expand(2, 6, 2))


@pytest.mark.parametrize("qkv_bias", [False, True])
def test_fused_with_the_splits_weights_gives_its_output(qkv_bias: bool) -> None:
    split, fused = without_projection(MultiHeadAttention(8, 8, 6, 0.0, 4, qkv_bias)), MultiHeadAttn(8, 6, 4)
    parts = [getattr(split, name) for name in PROJECTIONS]
    fused.c_attn.weight.data = torch.cat([part.weight.data for part in parts])
    biases = [part.bias.data if qkv_bias else torch.zeros(8) for part in parts]
    fused.c_attn.bias.data = torch.cat(biases)
    x = torch.randn(2, 6, 8)
    torch.testing.assert_close(fused(x), split(x))


def test_wrapper_equals_split_with_its_weights() -> None:
    wrapper = MultiHeadAttentionWrapper(3, 2, 6, 0.0, num_heads=3, qkv_bias=True)
    split = without_projection(MultiHeadAttention(3, 6, 6, 0.0, num_heads=3, qkv_bias=True))
    for name in PROJECTIONS:
        for kind in ("weight", "bias"):
            heads = [getattr(getattr(head, name), kind) for head in wrapper.heads]
            getattr(getattr(split, name), kind).data = torch.cat(heads)
    same(split(BATCH), wrapper(BATCH))


def test_causal_attention_drops_weights_in_training_only() -> None:
    torch.manual_seed(0)
    system = CausalAttention(3, 2, 6, 0.5)
    assert not torch.equal(system(BATCH), system(BATCH))
    system.eval()
    assert torch.equal(system(BATCH), system(BATCH))


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


def test_fused_keeps_the_names_of_the_chapter() -> None:
    system = MultiHeadAttn(4, 6, 2)
    assert {name: tuple(value.shape) for name, value in system.state_dict().items()} == {
        "bias": (1, 1, 6, 6),
        "c_attn.weight": (12, 4),
        "c_attn.bias": (12,),
    }
    assert torch.equal(system.bias[0, 0], torch.ones(6, 6).tril())
