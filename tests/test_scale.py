"""docs/scale.md holds what scripts/scale.py prints, and its formulas agree with what torch counts."""

import runpy
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from gpt import GPT, GPTConfig

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def scale():
    return runpy.run_path(str(ROOT / "scripts" / "scale.py"))


@pytest.mark.parametrize("table", ["tables", "recipes"])
def test_the_document_has_the_tables(table, scale):
    assert scale[table]() in (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("context", [256, 1024])
def test_operations_a_token_are_those_that_torch_counts(context, scale):
    """Torch also counts the product that attention's kernel does again backward, and no position rows."""
    config = GPTConfig(context_length=context)
    with torch.device("meta"):
        model = GPT(config)
        tokens = torch.zeros(2, context, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    counted = counter.get_total_flops() / tokens.numel()
    assert counted == pytest.approx(scale["flops_per_token"](config), rel=0.03)


def test_one_gpu_waits_for_nobody_and_more_share_the_work(scale):
    config = GPTConfig.from_name("gpt2-xl")
    one, eight, many = (scale["cost"](config, gpus) for gpus in (1, 8, 64))
    assert one.efficiency == 1.0
    assert one.hours == pytest.approx(10e9 * scale["flops_per_token"](config) / (989e12 * 0.4) / 3600)
    assert one.hours / 8 < eight.hours < one.hours / 7.8
    assert one.hours / 64 < many.hours < one.hours / 16
    assert many.dollars == pytest.approx(many.hours * 64 * 2.5)


def test_shards_divide_the_states_alone(scale):
    config = GPTConfig.from_name("gpt2-small")
    whole, quarter = scale["memory"](config, 8), scale["memory"](config, 8, shards=4)
    assert whole - quarter == pytest.approx(12 * 124_439_808)
