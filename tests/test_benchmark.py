"""The arithmetic that the benchmarks' figures rest on."""

import json
import re
from pathlib import Path

import pytest
from benchmarks import common


def test_rounds_are_interleaved() -> None:
    calls: list[str] = []
    timings = common.interleave({name: lambda name=name: calls.append(name) for name in "abc"}, rounds=2)
    assert "".join(calls) == "abc" + "cba" + "abc"
    assert [len(timings[name].seconds) for name in "abc"] == [2, 2, 2]


def test_a_ratio_is_the_median_of_the_rounds() -> None:
    fast, slow = common.Timing(seconds=[1.0, 10.0, 2.0]), common.Timing(seconds=[5.0, 20.0, 6.0])
    assert fast.times_faster_than(slow) == 3.0
    assert fast.median == 2.0
    assert common.Timing(seconds=[6.0, 20.0]).spread == pytest.approx(3.5 / 13)


def test_report(tmp_path: Path) -> None:
    rows = [{"module": "ours", "ms": 1.23456}]
    report = common.Report(title="A comparison", rows=rows, ratios={"ours_vs_theirs": 1.5})
    assert "| module | ms |\n| --- | --- |\n| ours | 1.235 |" in report.markdown()
    assert re.search(
        r"^<!-- measured: \S+, [\d-]{10}; code: gpt/model.py -->$", report.markdown("gpt/model.py"), re.M
    )
    report.write(tmp_path / "out.json")
    saved = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert saved["ratios"] == {"ours_vs_theirs": 1.5}
