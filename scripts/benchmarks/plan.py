"""`benchmark.py plan`: whether a run by --minutes takes the time, and reaches what it promised and could.

For each text and time: the planned run, then a grid of configurations chosen by hand, each given the same
time from the start of the process to its end. All end by the clock: plan and grid differ in shape alone.
"""

import json
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import Report, run_python, say

# Width, layers, vocabulary, context, windows: what someone might choose who knows the field.
GRID = (
    *((64, 2, 1024, 64, 24), (64, 4, 2048, 128, 12), (96, 3, 2048, 64, 24), (128, 2, 2048, 64, 24)),
    *((128, 4, 2048, 64, 24), (128, 4, 4096, 128, 12), (192, 4, 4096, 64, 24), (128, 4, 1024, 256, 6)),
)
NAMES = ("model.config.emb_dim", "model.config.num_layers", "model.config.vocab_size")
NAMES += ("model.config.context_length", "data.batch_size")


def run(quick: bool, text: Path | None = None) -> Report:
    """Measure every cell, or one text and two of the grid where `quick`; `text` is tinyshakespeare."""
    corpora = ["python-docs", *([str(text.resolve())] if text else []), "python-stdlib"]
    rows: list[dict[str, Any]] = []
    for corpus in corpora[:1] if quick else corpora:
        for minutes in (0.5,) if quick else (1.0, 4.0):
            say(f"{corpus}, {minutes:g} minutes: the plan")
            seconds, summary = _fit(corpus, minutes, {})
            planned, reached = summary["planned"]["bits_per_byte"], summary["val_bits_per_byte"]
            others = []
            for shape in GRID[:2] if quick else GRID:
                say(f"{corpus}, {minutes:g} minutes: {shape}")
                others.append(
                    _fit(corpus, minutes, dict(zip(NAMES, shape, strict=True)))[1]["val_bits_per_byte"]
                )
            rows.append(
                {
                    **{"text": Path(corpus).stem, "minutes": minutes, "seconds": seconds, "planned": planned},
                    **{"reached": reached, "best of the grid": min(others)},
                    **{
                        "time, %": 100 * (seconds / 60 / minutes - 1),
                        "prediction, %": 100 * (planned / reached - 1),
                    },
                    "result, %": 100 * (reached / min(others) - 1),
                }
            )
            say(str(rows[-1]))
    worst = {
        f"plan_{name[:-3]}_percent": max(abs(row[name]) for row in rows) for name in rows[0] if "%" in name
    }
    return Report(
        title="Runs by --minutes",
        rows=rows,
        ratios=worst,
        bars={
            f"{row['text']}, {row['minutes']:g}": {n: row[n] for n in ("planned", "reached")} for row in rows
        },
        unit="bits per byte",
        notes=["Seconds are whole processes. Each grid run is told its shape and the same minutes."],
    )


def _fit(corpus: str, minutes: float, options: dict[str, int]) -> tuple[float, dict[str, Any]]:
    """Seconds of a whole process and its summary; the first run of a text prepares it, as a user's does."""
    with tempfile.TemporaryDirectory() as folder:
        words = [f"--{name}={value}" for name, value in options.items()]
        command = ["-m", "gpt.cli", "fit", f"--minutes={minutes}", f"--data.corpus={corpus}", *words]
        began = time.perf_counter()
        run_python(command, Path(folder), {"GPT_CACHE": str(Path(folder) / "cache")})
        seconds = time.perf_counter() - began
        summary = json.loads(Path(folder, "runs", "planned", "summary.json").read_text(encoding="utf-8"))
        return seconds, summary
