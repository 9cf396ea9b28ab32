"""The chapters' systems: the values that they print, and what they say of one another.

The walkthrough computes every system, compares it with the printed values and with the other systems, and
stops where one differs.
"""

import runpy
import sys
from pathlib import Path

import pytest
import torch

from gpt.attention import CausalAttention, MultiHeadAttn
from gpt.errors import InputError

SCRIPT = Path(__file__).parents[2] / "scripts" / "examples" / "attention_walkthrough.py"
WALKTHROUGH = runpy.run_path(str(SCRIPT))


def test_all_systems_give_the_printed_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--output", str(tmp_path / "pictures")])

    WALKTHROUGH["main"]()

    lines = capsys.readouterr().out.splitlines()
    titles = [line.split()[0] for line in lines if line.startswith("S")]
    assert titles == [f"S{number}" for number in range(1, 11)]
    compared = {line.strip() for line in lines if line.startswith("    ")}
    assert compared >= {name[3:] for name in WALKTHROUGH["PRINTED"]}
    assert sum(line.endswith(" agree") for line in lines) == 9
    assert [path.name for path in (tmp_path / "pictures").iterdir()] == ["steps.png"]


def test_it_stops_where_values_differ_from_the_printed_ones_or_from_each_other() -> None:
    name = "S2 query of token 2"
    printed = torch.tensor(WALKTHROUGH["rows_of"](WALKTHROUGH["PRINTED"][name]))
    with pytest.raises(SystemExit, match=f"error: {name} differ from the chapter's"):
        WALKTHROUGH["compare"](name, printed + torch.tensor([0.0, 2e-4]))
    with pytest.raises(SystemExit, match="error: one and another do not agree"):
        WALKTHROUGH["agree"]("one and another", torch.zeros(2), torch.tensor([0.0, 1e-5]))


def test_causal_attention_drops_weights_in_training_only() -> None:
    system, x = CausalAttention(3, 2, 6, 0.5), torch.randn(2, 6, 3)
    assert not torch.equal(system(x), system(x))
    system.eval()
    assert torch.equal(system(x), system(x))


def test_fused_keeps_the_names_of_the_chapter() -> None:
    system = MultiHeadAttn(4, 6, 2)
    shapes = {name: tuple(value.shape) for name, value in system.state_dict().items()}
    assert shapes == {"bias": (1, 1, 6, 6), "c_attn.weight": (12, 4), "c_attn.bias": (12,)}
    assert torch.equal(system.bias[0, 0], torch.ones(6, 6).tril())
    with pytest.raises(InputError, match="n_embd 4 is not divisible by n_heads 3"):
        MultiHeadAttn(4, 6, 3)
