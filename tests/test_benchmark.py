"""The arithmetic that the benchmarks' figures rest on."""

import json
import struct
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


def test_a_candidate_may_measure_itself(common) -> None:
    timings = common.interleave({"own": lambda: common.Seconds(7), "timed": lambda: 7.0}, rounds=3)
    assert timings["own"].median == 7
    assert timings["timed"].median < 1


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


def messages_file(messages: dict[str, str]) -> bytes:
    """A catalogue of translations as gettext's manual describes it."""
    keys, values = (list(map(str.encode, texts)) for texts in (messages, messages.values()))
    at, tables = 28 + 16 * len(keys), [b"", b""]
    for number, texts in enumerate((keys, values)):
        for text in texts:
            tables[number] += struct.pack("<II", len(text), at)
            at += len(text) + 1
    head = struct.pack("<7I", 0x950412DE, 0, len(keys), 28, 28 + 8 * len(keys), 0, 0)
    return head + b"".join(tables) + b"".join(text + b"\0" for text in [*keys, *values])


def test_the_text_of_a_script(common, tmp_path: Path) -> None:
    from benchmarks.languages import _extract

    (tmp_path / "book").mkdir()
    page = "<head><title>العنوان</title></head><p>" + "نص عربي طويل with a word</p><p>Not translated</p>" * 20
    (tmp_path / "book" / "page.html").write_text(page, encoding="utf-8")
    translated = {"": "Content-Type: text/plain; charset=UTF-8\n"} | {
        f"Open {number}": f"افت_ح {number} " + "مرة أخرى " * 40 for number in range(2)
    }
    (tmp_path / "book" / "menu.mo").write_bytes(messages_file(translated | {"Close": "Close"}))
    size = _extract(tmp_path / "book", tmp_path / "text", "arabic")
    texts = [path.read_text(encoding="utf-8") for path in sorted((tmp_path / "text").iterdir())]
    assert texts[0].startswith("افتح 0 مرة أخرى ") and texts[0].count("\n") == 2  # menu.mo
    assert texts[1] == "نص عربي طويل with a word\n" * 20
    assert size == sum(map(len, texts))
