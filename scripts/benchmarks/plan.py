"""`benchmark.py plan`: runs by --minutes, by this checkout and by a baseline's, text by text.

Both get the same time from the start of the process to its end, and begin with an empty cache. They take
turns on all cores, or run beside each other on a core each. A run is a row of the table as soon as it has
ended; what is there is not run again.
"""

import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import fmean
from threading import Lock
from typing import Any

import yaml
from benchmarks.common import ROOT, Report, say

OURS = "rule"
COLUMNS = (
    *("text", "minutes", "seed", "program", "seconds", "bits_per_byte", "steps", "emb_dim", "num_layers"),
    *("vocab_size", "context_length", "batch_size", "dropout", "bpe_dropout"),
)
KEY = COLUMNS[:4]
_writing = Lock()


def run(
    quick: bool,
    texts: str = "python-docs,python-stdlib",
    minutes: str = "1",
    seeds: str = "1337",
    baseline: Path | None = None,
    table: Path = Path("plans.csv"),
    beside: bool = False,
) -> Report:
    """Measure the rows that are missing; `quick` leaves one text. `baseline` is a checkout of this.

    With `beside`, which needs Linux, both programs run at the same time on a core each, and change cores from
    text to text.
    """
    programs = {OURS: ROOT, **({"baseline": baseline.resolve()} if baseline else {})}
    corpora = texts.split(",")[: 1 if quick else None]
    order = list(programs)
    for number in map(float, minutes.split(",")):
        for seed in map(int, seeds.split(",")):
            for corpus in corpora:
                order.reverse()
                cores = range(len(order)) if beside else [None] * len(order)
                runs = [
                    partial(_measure, table, corpus, number, seed, name, programs[name], core)
                    for name, core in zip(order, cores, strict=True)
                ]
                with ThreadPoolExecutor(len(runs) if beside else 1) as pool:
                    list(pool.map(lambda measure: measure(), runs))  # raises what one of them raises
    rows = _read(table)
    summary = [
        line
        for number in minutes.split(",")
        for corpus in corpora
        if (line := _summary(rows, Path(corpus).name, float(number)))
    ]
    changes = [line["change, %"] for line in summary if line["change, %"] is not None]
    ratios = {"rule_vs_baseline_percent_mean": sum(changes) / len(changes)} if changes else {}
    notes = ["Seconds are whole processes. A change below 0 is a gain; several seeds are their mean."]
    return Report(title="Runs by --minutes", rows=summary, ratios=ratios, notes=notes)


def _measure(
    table: Path,
    corpus: str,
    minutes: float,
    seed: int,
    program: str,
    checkout: Path,
    core: int | None = None,
) -> None:
    """Run one program on one text, on all cores or on one, and write its row, unless it is there."""
    name = Path(corpus).name
    key = dict(zip(KEY, (name, f"{minutes:g}", str(seed), program), strict=True))
    if any(key.items() <= row.items() for row in _read(table)):
        return
    given = os.path.abspath(corpus) if os.path.exists(corpus) else corpus
    command = [sys.executable, "-m", "gpt", "fit", given, f"--minutes={minutes}", "--run=r"]
    command.append(f"--seed_everything={seed}")
    threads = {}
    if core is not None:
        command = ["taskset", "--cpu-list", str(core), *command]
        threads = {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPATH": str(checkout), "GPT_CACHE": f"{folder}/cache", **threads}
        began = time.perf_counter()
        done = subprocess.run(
            command, cwd=folder, env=environment, check=False, capture_output=True, encoding="utf-8"
        )
        seconds = time.perf_counter() - began
        if done.returncode:
            say(f"{key}: {done.stderr[-2000:]}")
            return
        place = Path(folder, "runs", "r")
        summary = json.loads((place / "summary.json").read_text(encoding="utf-8"))
        options = yaml.safe_load((place / "config.yaml").read_text(encoding="utf-8"))
    values: dict[str, Any] = {
        **key,
        "seconds": f"{seconds:.1f}",
        "bits_per_byte": f"{summary['reached']['bits_per_byte']:.5f}",
        "steps": summary["steps"],
        **options["model"]["config"],
        **options["data"],
    }
    _write(table, values)
    say(f"{key}: {values['bits_per_byte']} in {seconds:.1f} s")


def _write(table: Path, values: dict[str, Any]) -> None:
    """Append a row."""
    with _writing, table.open("a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
        if not file.tell():
            writer.writeheader()
        writer.writerow(values)


def _read(table: Path) -> list[dict[str, str]]:
    if not table.exists():
        return []
    with table.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _summary(rows: list[dict[str, str]], text: str, minutes: float) -> dict[str, Any] | None:
    """A line of the report; None without a run of this checkout."""
    here = [row for row in rows if row["text"] == text and float(row["minutes"]) == minutes]
    mine = {row["seed"]: row for row in here if row["program"] == OURS}
    theirs = {row["seed"]: row for row in here if row["program"] == "baseline"}
    if not mine:
        return None
    shared = mine.keys() & theirs.keys()  # a run that failed has no row
    reached = fmean(float(mine[seed]["bits_per_byte"]) for seed in shared or mine)
    base = fmean(float(theirs[seed]["bits_per_byte"]) for seed in shared) if shared else None
    ours = [*mine.values()][-1]
    return {
        "text": text,
        "minutes": minutes,
        "shape": f"{ours['emb_dim']} x {ours['num_layers']}, {ours['vocab_size']}",
        "batch": f"{ours['batch_size']} x {ours['context_length']}",
        "seconds": float(ours["seconds"]),
        "reached": reached,
        "baseline": base,
        "change, %": 100 * (reached / base - 1) if base else None,
    }
