"""The arithmetic that the benchmarks' figures rest on."""

import json
import sys
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture
def common(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import benchmarks.common

    yield benchmarks.common
    for name in [name for name in sys.modules if name.split(".")[0] == "benchmarks"]:
        del sys.modules[name]


def test_rounds_are_interleaved(common) -> None:
    calls: list[str] = []
    timings = common.interleave(
        {name: lambda name=name: calls.append(name) for name in "abc"}, rounds=4, every={"c": 2}
    )
    assert "".join(calls) == "abc" + "cba" + "ab" + "cba" + "ab"
    assert [sorted(timings[name].seconds) for name in "abc"] == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 2]]


def test_ratios_are_of_rounds_that_have_both(common) -> None:
    fast = common.Timing(seconds={0: 1.0, 1: 10.0, 2: 2.0})
    slow = common.Timing(seconds={1: 20.0, 2: 6.0})
    assert fast.times_faster_than(slow) == 2.5
    assert fast.median == 2.0
    assert slow.spread == pytest.approx(3.5 / 13)
    assert common.geometric_mean([2.0, 0.5]) == pytest.approx(1.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts the GPU's memory where there is one")
def test_peak_memory_counts_what_was_held_at_once(common) -> None:
    def call() -> None:
        one = torch.empty(1_000_000, dtype=torch.uint8)
        del one
        both = torch.empty(2_000_000, dtype=torch.uint8), torch.empty(3_000_000, dtype=torch.uint8)
        del both

    assert 5_000_000 <= common.peak_memory(call) < 5_010_000


def test_report(common, tmp_path: Path) -> None:
    report = common.Report(
        title="A comparison",
        rows=[{"module": "ours", "ms": 1.23456}],
        ratios={"ours_vs_theirs": 1.5},
        bars={"small": {"ours": 1.0, "theirs": 1.5}},
        unit="ms",
    )
    assert "| module | ms |\n| --- | --- |\n| ours | 1.235 |" in report.markdown()
    report.write(tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["ratios"] == {
        "ours_vs_theirs": 1.5
    }
    report.draw(tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
