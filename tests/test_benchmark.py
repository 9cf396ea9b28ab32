"""The arithmetic that the benchmarks' figures rest on."""

import re

import benchmark
import pytest
from benchmarks import common


def test_rounds_are_interleaved():
    calls = []
    timings = common.interleave({name: lambda name=name: calls.append(name) for name in "abc"}, rounds=2)
    assert "".join(calls) == "abc" + "cba" + "abc"
    assert [len(timings[name].seconds) for name in "abc"] == [2, 2, 2]


def test_a_ratio_is_the_median_of_the_rounds():
    fast, slow = common.Timing(seconds=[1.0, 10.0, 2.0]), common.Timing(seconds=[5.0, 20.0, 6.0])
    assert fast.times_faster_than(slow) == 3.0
    assert fast.median == 2.0
    assert common.Timing(seconds=[6.0, 20.0]).spread == pytest.approx(3.5 / 13)


def test_a_page_gets_a_wider_table_between_its_marks():
    names = "program", "precision", "tokens/s", "spread"
    cells = ("ours", "fp32", 2.0, "1%"), ("ours", "bf16", 4.0, "1%"), ("theirs", "fp32", 1.0, "1%")
    rows = [dict(zip(names, row, strict=True)) for row in cells]
    report = common.Report(title="A step", rows=rows, ratios={}, across=("precision", "tokens/s"))
    page = "# Page\n\n<!-- benchmark step -->\nold\n<!-- end of benchmark step -->\n\nThe end.\n"

    written = benchmark.replaced(page, "step", report.section("gpt"))

    assert "| program | fp32 | bf16 |\n| --- | --- | --- |\n| ours | 2 | 4 |\n| theirs | 1 |  |\n" in written
    assert written.startswith("# Page\n") and written.endswith("\nThe end.\n") and "old" not in written


@pytest.mark.parametrize("page", ["# Page\n", None], ids=["no marks", "no page"])
def test_a_page_without_the_marks_is_refused_before_anything_is_measured(page, tmp_path, monkeypatch, capsys):
    if page:
        (tmp_path / "page.md").write_text(page, "utf-8")
    monkeypatch.setattr("gpt.cores.limit_threads", lambda: None)
    monkeypatch.setattr(common, "commit", lambda: "abcdefg")
    monkeypatch.setattr(benchmark, "import_module", lambda name: pytest.fail("it measures"))
    monkeypatch.setattr("sys.argv", ["benchmark.py", "step", f"--write={tmp_path / 'page.md'}"])
    with pytest.raises(SystemExit) as ended:
        benchmark.main()
    assert ended.value.code == 2 and "page.md: " in capsys.readouterr().err


def test_every_benchmark_but_those_run_by_hand_has_its_place_in_the_page():
    page = (common.ROOT / "docs" / "benchmarks.md").read_text("utf-8")
    named = re.findall(r"<!-- benchmark (\w+) -->", page)
    assert set(named) == benchmark.NAMES.keys() - benchmark.BY_HAND
