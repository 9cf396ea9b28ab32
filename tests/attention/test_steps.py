"""The chapters' systems: the printed values, which the walkthrough compares, and what the text says."""

import runpy
import sys
from pathlib import Path

import pytest
import torch

from gpt.attention import CausalAttention, MultiHeadAttention, MultiHeadAttentionWrapper, MultiHeadAttn

SCRIPT = Path(__file__).parents[2] / "scripts" / "examples" / "attention_walkthrough.py"
WALKTHROUGH = runpy.run_path(str(SCRIPT))
BATCH = WALKTHROUGH["BATCH"]


def test_all_ten_systems_give_the_printed_values(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--output", str(tmp_path / "pictures")])
    WALKTHROUGH["main"]()
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines() if line[:1] == "S"] == [
        f"S{number}" for number in range(1, 11)
    ]
    compared = [name for name in WALKTHROUGH["PRINTED"] if f"    {name[3:]}\n" in out]
    assert len(compared) == len(WALKTHROUGH["PRINTED"]) >= 16
    assert out.count(" agree\n") == 9
    assert "All values are the chapters'" in out
    assert [path.name for path in (tmp_path / "pictures").iterdir()] == ["steps.png"]


def test_a_value_that_differs_stops_it(monkeypatch, capsys) -> None:
    wrong = "0.9544 1.4950 1.4755 0.8434 0.7070 1.0865"
    monkeypatch.setitem(WALKTHROUGH["PRINTED"], "S1 scores of token 2", wrong)
    with pytest.raises(SystemExit, match="S1 scores of token 2 differ"):
        WALKTHROUGH["without_weights"]()
    assert "1.4754" in capsys.readouterr().out


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
def test_later_tokens_change_nothing_before_them(system_type, arguments: tuple) -> None:
    system = system_type(*arguments)
    for changed in (1, 3, 5):
        other = BATCH.clone()
        other[:, changed:] += 1.0
        before, after = system(BATCH), system(other)
        assert torch.equal(before[:, :changed], after[:, :changed])
        assert not torch.allclose(before[:, changed:], after[:, changed:])


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
