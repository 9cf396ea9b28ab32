"""`benchmark.py plan`: whether a run by --minutes takes the time, and reaches what it promised and could.

Parts: the plans; a grid of shapes chosen by hand; the plans' neighbours; plans while another process takes a
core from half-way on. All get the same time from the start of the process to its end. Each finished cell is a
row of scripts/scaling/planned.csv, from which the law learns too; a cell that is there is not run again, and
the table shows all that are there for this machine and law.
"""

import csv
import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from benchmarks.common import ROOT, Report, machine, run_python, say
from scaling.sweep import TRIAL, columns

from gpt.data.shards import META, Prepared
from gpt.files import shipped
from gpt.plan.plan import CHOICES
from gpt.plan.recommend import trial_steps
from gpt.plan.text import measure

TABLE = ROOT / "scripts" / "scaling" / "planned.csv"
# Width, layers, vocabulary, context, windows: what someone might choose who knows the field.
GRID = (
    *((64, 2, 1024, 64, 24), (64, 4, 2048, 128, 12), (96, 3, 2048, 64, 24), (128, 2, 2048, 64, 24)),
    *((128, 4, 2048, 64, 24), (128, 4, 4096, 128, 12), (192, 4, 4096, 64, 24), (128, 4, 1024, 256, 6)),
)
SHAPE = ("emb_dim", "num_layers", "vocab_size", "context_length", "batch_size")
KEY = ("machine", "law", "part", "text", "minutes", *SHAPE)
RESULTS = ("seconds", "planned", "bits_per_byte", "steps", "batch_tokens", "lr", "weight_decay")
RESULTS += ("parameters", "train_bytes", "held_out_bytes_per_token")
RESULTS += tuple(f"trial_{name}" for name in TRIAL)
RESULTS += ("dropout", "bpe_dropout", "scaled")
PARTS = ("plan", "grid", "neighbours", "stolen")
BUSY = "import time\ntime.sleep({})\nwhile True: pass"


def run(
    quick: bool,
    texts: str = "python-docs,python-stdlib",
    minutes: str = "1,4",
    part: str = "plan,grid",
) -> Report:
    """Measure the cells that are missing; `quick` leaves two of the grid.

    `texts` are corpora, each with a name of its own, `NAME=CORPUS`, or its own.
    """
    parts = part.split(",")
    if unknown := set(parts) - set(PARTS):
        raise SystemExit(f"--part {','.join(unknown)}: expected some of {', '.join(PARTS)}")
    pairs = [text.partition("=") for text in texts.split(",")]
    corpora = {name: os.path.abspath(corpus) if named else name for name, named, corpus in pairs}
    times = [float(number) for number in minutes.split(",")]
    for name, corpus in corpora.items():
        for time_given in times:
            for which in parts:
                for shape in _shapes(which, name, time_given)[: 2 if quick else None]:
                    _cell(which, name, corpus, time_given, shape)
    rows = [row for name in corpora for time_given in times if (row := _summary(name, time_given))]
    if not rows:
        raise SystemExit("nothing to show: run --part plan first")
    worst = {
        f"plan_{column[:-3].replace(' ', '_')}_percent": max(abs(row[column]) for row in rows if row[column])
        for column in rows[0]
        if column.endswith(", %") and any(row[column] for row in rows)
    }
    notes = ["Seconds are whole processes. Each run of the grid is told its shape and the same minutes."]
    return Report(title="Runs by --minutes", rows=rows, ratios=worst, notes=notes)


def machine_name() -> str:
    """The processor, and how many threads compute."""
    found = machine()
    return f"{found['cpu']} x {found['threads']}"


def _here() -> dict[str, str]:
    """This machine, and a hash of the law."""
    law = (shipped("assets") / "law.json").read_bytes()
    return {"machine": machine_name(), "law": hashlib.sha256(law).hexdigest()[:8]}


def _finished(part: str, text: str, minutes: float) -> list[dict[str, str]]:
    """The rows of a part; a shape given by hand reaches the same by any law."""
    if not TABLE.exists():
        return []
    wanted = {**_here(), "part": part, "text": text, "minutes": f"{minutes:g}"}
    if part in ("grid", "neighbours"):
        del wanted["law"]
    with TABLE.open(encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file) if wanted.items() <= row.items()]


def _shapes(part: str, text: str, minutes: float) -> list[tuple[int, ...] | None]:
    """What to run; None leaves the shape to the plan."""
    if part in ("plan", "stolen"):
        return [None]
    if part == "grid":
        return list(GRID)
    planned = _finished("plan", text, minutes)
    if not planned:
        raise SystemExit(f"{text}, {minutes:g} minutes: run --part plan before its neighbours")
    width, *rest = (int(planned[-1][name]) for name in SHAPE)
    layers, vocab_size, *windows = rest
    widths = CHOICES["model.config.emb_dim"]
    at = widths.index(width)
    wider, narrower = widths[min(at + 1, len(widths) - 1)], widths[max(at - 1, 0)]
    near = [(wider, layers, vocab_size), (narrower, layers, vocab_size)]
    near += [(width, layers, vocab_size * 2), (width, layers, max(vocab_size // 2, 300))]
    return [(*shape, *windows) for shape in near]


def _cell(part: str, text: str, corpus: str, minutes: float, shape: tuple[int, ...] | None) -> None:
    """Run a cell and write its row, unless it is there."""
    for row in _finished(part, text, minutes):
        if shape is None or shape == tuple(int(row[name]) for name in SHAPE):
            return
    say(f"{text}, {minutes:g} minutes, {part}: {shape or 'planned'}")
    given = dict(zip(SHAPE, shape or (), strict=False))
    options = [f"--{'data' if n == 'batch_size' else 'model.config'}.{n}={v}" for n, v in given.items()]
    with tempfile.TemporaryDirectory() as folder:
        command = ["-m", "gpt.cli", "fit", f"--minutes={minutes}", f"--data.corpus={corpus}", *options]
        # The first run of a text prepares it, as a user's does.
        environment = {"GPT_CACHE": str(Path(folder) / "cache")}
        busy = [sys.executable, "-c", BUSY.format(30 * minutes)]
        thief = subprocess.Popen(busy) if part == "stolen" else None
        began = time.perf_counter()
        try:
            run_python(command, Path(folder), environment)
        finally:
            seconds = time.perf_counter() - began
            if thief:
                thief.kill()
                thief.wait()
        done = Path(folder, "runs", "planned")
        summary = json.loads((done / "summary.json").read_text(encoding="utf-8"))
        config = yaml.safe_load((done / "config.yaml").read_text(encoding="utf-8"))
        prepared = Prepared(next(Path(folder, "cache").rglob(META)).parent)
        train_bytes = prepared.counts["train"].bytes
    taken = {**config["model"]["config"], "batch_size": config["data"]["batch_size"]}
    bits = summary["reached"]["bits_per_byte"]
    values = {
        **{**_here(), "part": part, "text": text, "minutes": f"{minutes:g}"},
        **{name: taken[name] for name in SHAPE},
        **{"seconds": seconds, "planned": summary["planned"]["bits_per_byte"], "bits_per_byte": bits},
        **{"steps": summary["steps"], "batch_tokens": taken["batch_size"] * taken["context_length"]},
        **{name: config["model"]["optimizer"][name] for name in ("lr", "weight_decay")},
        **{"parameters": summary["parameters"], "train_bytes": train_bytes},
        "held_out_bytes_per_token": summary["val_loss"] / math.log(2) / summary["val_bits_per_byte"],
        **_trial(corpus, minutes, config["data"]["most_bytes"]),
        "dropout": taken["dropout"],
        "bpe_dropout": config["data"]["bpe_dropout"],
        "scaled": int(config["temperature_scaling"]),
    }
    new = not TABLE.exists()
    with TABLE.open("a", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if new:
            writer.writerow((*KEY, *RESULTS))
        cells = (values[name] for name in (*KEY, *RESULTS))
        writer.writerow(f"{value:.6g}" if isinstance(value, float) else value for value in cells)
    say(f"  {seconds:.1f} s, {values['planned']:.4g} planned, {bits:.4g} reached in {values['steps']} steps")


@cache
def _trial(corpus: str, minutes: float, most_bytes: int | None) -> dict[str, Any]:
    return columns(measure(corpus, most_bytes=most_bytes, steps=trial_steps(minutes)).trial)


def _summary(text: str, minutes: float) -> dict[str, Any] | None:
    """A line of the table; None without a plan."""
    found = {part: _finished(part, text, minutes) for part in PARTS}
    if not found["plan"]:
        return None
    plan = found["plan"][-1]
    reached, asked = float(plan["bits_per_byte"]), 60 * minutes
    best = {
        part: min((float(r["bits_per_byte"]) for r in rows), default=None) for part, rows in found.items()
    }
    stolen = [float(row["seconds"]) for row in found["stolen"]]
    others = [float(row["planned"]) / float(row["bits_per_byte"]) for rows in found.values() for row in rows]
    return {
        **{"text": text, "minutes": minutes},
        "plan": f"{plan['emb_dim']} x {plan['num_layers']}, {plan['vocab_size']}, {plan['context_length']}",
        **{"seconds": float(plan["seconds"]), "planned": float(plan["planned"]), "reached": reached},
        **{"best of the grid": best["grid"], "best neighbour": best["neighbours"]},
        "time, %": 100 * (float(plan["seconds"]) / asked - 1),
        "prediction, %": 100 * (float(plan["planned"]) / reached - 1),
        "prediction of any cell, %": max((100 * (ratio - 1) for ratio in others), key=abs),
        "result, %": 100 * (reached / best["grid"] - 1) if best["grid"] else None,
        "beside neighbours, %": 100 * (reached / best["neighbours"] - 1) if best["neighbours"] else None,
        "time with a core stolen, %": 100 * (stolen[-1] / asked - 1) if stolen else None,
    }
