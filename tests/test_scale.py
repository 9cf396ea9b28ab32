"""docs/scale.md contains the output of scripts/scale.py, whose formulas agree with torch's own count."""

import importlib
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
def test_the_document_contains_the_tables(table, scale):
    assert scale[table]() in (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")


def test_the_roofline_is_in_the_document_and_half_of_the_peak_takes_all_improvements():
    roofline = importlib.import_module("roofline")
    assert roofline.tables() in (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    fractions = [roofline.utilisation(step, roofline.GPUS["H200"]) for step in roofline.STEPS.values()]
    assert fractions == sorted(fractions)
    assert fractions[0] < 0.5 < fractions[-1]


@pytest.mark.parametrize("context", [256, 1024])
def test_operations_per_token_equal_torchs_count(context, scale):
    """Within 3 %: torch also counts the product that attention's kernel repeats in the backward pass."""
    config = GPTConfig(context_length=context)
    with torch.device("meta"):
        model = GPT(config)
        tokens = torch.zeros(2, context, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    counted = counter.get_total_flops() / tokens.numel()
    assert counted == pytest.approx(scale["flops_per_token"](config), rel=0.03)


def test_one_gpu_has_no_traffic_and_more_divide_the_work(scale):
    config = GPTConfig.from_name("gpt2-xl")
    one, eight, many = (scale["cost"](config, gpus) for gpus in (1, 8, 64))
    assert one.efficiency == 1.0
    assert one.hours == pytest.approx(10e9 * scale["flops_per_token"](config) / (989e12 * 0.4) / 3600)
    assert one.hours / 8 < eight.hours < one.hours / 7.8
    assert one.hours / 64 < many.hours < one.hours / 16
    assert many.dollars == pytest.approx(many.hours * 64 * 2.5)


def test_sharding_divides_only_the_states(scale):
    config = GPTConfig.from_name("gpt2-small")
    full, quarter = scale["memory"](config, 8), scale["memory"](config, 8, shards=4)
    assert full - quarter == pytest.approx(12 * 124_439_808)
