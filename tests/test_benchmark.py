"""The arithmetic that the benchmarks' figures rest on."""

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
