"""The arithmetic that the benchmarks' figures rest on."""

import json
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gpt.plan.law import Trial

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


@pytest.fixture
def plans(common, tmp_path, monkeypatch):
    """`benchmark.py plan` with runs that take no time; the list grows with each."""
    from benchmarks import plan

    runs: list[list[str]] = []

    def fake(command: list[str], folder: Path, environment: dict[str, str]) -> None:
        runs.append(command)
        given = dict(option[2:].split("=") for option in command[3:])
        planned = {"emb_dim": 128, "num_layers": 2, "vocab_size": 2048, "context_length": 64}
        config = {name: int(given.get(f"model.config.{name}", value)) for name, value in planned.items()}
        done = folder / "runs" / "planned"
        done.mkdir(parents=True)
        bits = 2.0 + abs(config["emb_dim"] - 96) / 1000
        summary = {"val_bits_per_byte": bits, "val_loss": bits, "steps": 9, "parameters": 7}
        (done / "summary.json").write_text(
            json.dumps({**summary, "planned": {"bits_per_byte": 2.2}}), "utf-8"
        )
        optimizer = {"lr": 0.005, "weight_decay": 0.4}
        options = {
            "model": {"config": config, "optimizer": optimizer},
            "data": {"batch_size": int(given.get("data.batch_size", 24))},
        }
        (done / "config.yaml").write_text(json.dumps(options), "utf-8")
        prepared = Path(environment["GPT_CACHE"], "prepared")
        prepared.mkdir(parents=True)
        (prepared / "meta.json").touch()

    monkeypatch.setattr(plan, "TABLE", tmp_path / "planned.csv")
    monkeypatch.setattr(plan, "run_python", fake)
    monkeypatch.setattr(plan, "Prepared", lambda folder: SimpleNamespace(count=lambda *_: 1000))
    monkeypatch.setattr(plan, "_trial", lambda corpus: {field.name: 2.5 for field in fields(Trial)})
    return plan, runs


def test_plans_beside_a_grid_resume(plans) -> None:
    plan, runs = plans
    options = {"texts": "python-docs", "minutes": "0.5"}
    assert plan.run(quick=True, part="plan", **options).rows[0]["result, %"] is None
    (row,) = plan.run(quick=True, part="grid,neighbours", **options).rows
    assert len(runs) == 1 + 2 + 2
    assert runs[3][5] == "--model.config.emb_dim=160"  # the next wider than the plan's
    assert row["best of the grid"] == pytest.approx(2.032)
    assert row["result, %"] == pytest.approx(0.0)
    assert row["beside neighbours, %"] == pytest.approx(100 * (2.032 / 2.0 - 1))
    assert row["prediction, %"] == pytest.approx(100 * (2.2 / 2.032 - 1))
    assert plan.run(quick=True, part="plan,grid,neighbours", **options).rows == [row]
    assert len(runs) == 5


def test_another_law_is_planned_by_again(plans, monkeypatch) -> None:
    plan, runs = plans
    options = {"texts": "python-docs", "minutes": "0.5", "part": "plan,grid"}
    plan.run(quick=True, **options)
    monkeypatch.setattr(plan, "_here", lambda: {"machine": plan.machine_name(), "law": "another"})
    plan.run(quick=True, **options)
    assert len(runs) == 3 + 1


def test_a_part_that_does_not_exist(plans) -> None:
    plan, _ = plans
    with pytest.raises(SystemExit, match="--part gird: expected some of plan, grid"):
        plan.run(quick=True, part="gird")
    with pytest.raises(SystemExit, match="run --part plan before its neighbours"):
        plan.run(quick=True, part="neighbours", texts="python-docs")
