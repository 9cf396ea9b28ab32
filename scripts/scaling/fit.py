"""Fit the scaling law to the tables beside this file: `python scripts/scaling/fit.py`.

Writes gpt/assets/law.json and docs/scaling.png (predicted against reached), and prints the errors, for each
kind of text also where the law is fitted without it. Errors are of the logarithm of bits per byte; Huber's
weights keep single cells from deciding (Hoffmann et al. 2022, section 3.3).
"""

import csv
import json
import math
import re
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from gpt.files import atomic_write, write_json
from gpt.plan.law import STEADY, Law, Trial
from gpt.plan.text import SAME

ROOT, TABLE = Path(__file__).parents[2], Path(__file__).with_name("sweep.csv")
# Where the search begins, and the width of a weak prior on the logarithm of each constant.
START = {
    **{"blocks": (4.0, 1.5), "blocks_power": (0.3, 0.4), "table": (30.0, 1.5), "table_power": (0.3, 0.4)},
    **{"bytes": (30.0, 2.0), "bytes_power": (0.3, 0.4), "token_power": (1.0, 0.5)},
    **{"context": (1.0, 1.5), "context_power": (0.6, 0.5), "window": (200.0, 1.0)},
    **{"copying": (1.0, 1.0), "batch": (3000.0, 1.0)},
    **{"overfit": (0.005, 2.0), "table_overfit": (3.0, 1.0)},
    **{"respelled": (0.7, 0.3), "respelling": (0.023, 0.1)},  # by the ten pairs of docs/log.md
    **{"dropped": (0.25, 0.5), "dropping": (0.6, 0.5), "scaled": (0.5, 0.5)},
}
# Standard errors of a run's bits per byte: those by hand or by --minutes, whose text has its own part in it;
# short ones of the sweep; those on a GPU, which had the rates of small batches; pairs of long runs on a text.
RUN_ERROR = 0.015
ERRORS = {"sweep": 0.025, "gpu": 0.03, "regularised": 0.0075}
HUBER = 1.5  # standard errors
WITHIN = 0.9  # of the runs are no further from their predictions than these say
MOST_PASSES = 14  # cells without temperature scaling that read a text more often have learned it by heart
MOST_FALL = 0.43  # of a trial, as a power of its steps: what falls faster has a star
FAMILIES = {  # extracts, translations
    **{"shake200": "shakespeare", "docs200": "python-docs", "code200": "python-stdlib"},
    **{"anarchism100": "anarchism", "reference-de": "reference", "reference-es": "reference"},
    **dict.fromkeys(("handbook-en", "handbook-ru", "handbook-zh", "html-it", "ja"), "handbook"),
    **{"100kb": "quotes", "fortunes-de200": "fortunes-de", "elisp200": "elisp"},
    **dict.fromkeys(("french", "finnish100"), "aptitude"),
    **{"perl": "perl-doc", "lisp": "elisp"},
}
USUAL = 1.0, 0.4  # times the law's learning rates; weight decay
FITTED = "sweep.csv", "by_hand.csv", "planned.csv", "earlier.csv", "gpu.csv", "regularised.csv"
HELD_BACK = ("held_back.csv",)  # texts that no law was fitted to
IN_NO_FIT = "in no fit"
QUARTERS = ("trial_bits_per_byte", "trial_earlier")  # columns with a number for each
DIFFERENCES = ("earlier", "regularised")  # tables of which only the differences within a text count


def number(cell: str) -> Any:
    """A number, or the four of a trial's quarters."""
    found = [float(value) for value in cell.split()]
    return found[0] if len(found) == 1 else np.array(found)


def read(tables: tuple[str, ...] = FITTED) -> list[dict[str, Any]]:
    """The rows of the tables as numbers, with the law's arguments; docs/planning.md has those by hand."""
    rows: list[dict[str, Any]] = []
    for table in map(TABLE.with_name, tables):
        if table.exists():
            with table.open(encoding="utf-8", newline="") as file:
                for row in csv.DictReader(file):
                    words = ("text", "machine", "law", "part")
                    numbers = {name: value if name in words else number(value) for name, value in row.items()}
                    text = re.sub(r"-\d+$", "", row["text"])  # without the minutes
                    numbers["family"] = FAMILIES.get(text, text)
                    numbers["error"] = ERRORS.get(table.stem, RUN_ERROR)
                    numbers["source"] = table.stem
                    # Of texts that were divided in another way only the differences count.
                    numbers["group"] = f"{table.stem} {row['text']}" if table.stem in DIFFERENCES else ""
                    rows.append(numbers)
    rows += beside(rows)
    for row in rows:
        for name in QUARTERS:  # of an older trial one number for all
            row[name] = np.broadcast_to(row[name], 4)
        width = row["emb_dim"]
        layers = row["num_layers"]
        context = row["context_length"]
        row["blocks"] = 12 * layers * width**2
        row["table"] = row["parameters"] - row["blocks"] - width * (13 * layers + context + 2)
        row["unique"], row["batch"] = row["train_bytes"], row["batch_tokens"]
        row["per_token"] = row["held_out_bytes_per_token"]
        row["context"] = context
        row["respelled"] = float(row.get("bpe_dropout", 0) > 0)
        row.setdefault("scaled", float(row["source"] == "regularised"))
        row.setdefault("dropout", 0.0)
        row["seen"] = row["steps"] * row["batch_tokens"] * row["per_token"]
    rows = [row for row in rows if fall(row) <= MOST_FALL]
    return [row for row in rows if row["scaled"] or row["seen"] <= MOST_PASSES * row["unique"]]


def beside(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The runs by --minutes that have neighbours, once more: what differs between them decides choices."""

    def cell(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["machine"], row["text"], row["minutes"]

    planned = [row for row in rows if row["source"] == "planned"]
    cells = {cell(row) for row in planned if row["part"] == "neighbours"}
    changed = {"source": "regularised", "error": ERRORS["regularised"]}
    return [{**row, **changed, "group": f"beside {cell(row)}"} for row in planned if cell(row) in cells]


def fall(row: dict[str, Any]) -> float:
    """How fast the bits of a row's trial fell, as a power of its steps."""
    bits = np.mean(row["trial_earlier"]) / np.mean(row["trial_bits_per_byte"])
    return math.log(bits) / math.log(row["trial_seen"] / row["trial_earlier_seen"])


NUMBERS = ("blocks", "table", "context", "seen", "unique", "batch", "per_token")
SETTINGS = ("respelled", "dropout", "scaled")


def is_run(row: dict[str, Any]) -> bool:
    """Whether it is comparable with what a person would run today."""
    return row["source"] not in ("sweep", *DIFFERENCES)


def law_of(logs: np.ndarray) -> Law:
    """That whose constants have these logarithms."""
    constants = dict(zip(START, np.exp(logs).tolist(), strict=True))
    return Law(**constants, error=0.0, measured={})


def predict(logs: np.ndarray, rows: list[dict[str, Any]]) -> np.ndarray:
    """Bits per byte by the law whose constants have these logarithms."""
    numbers = {name: np.array([row[name] for row in rows]) for name in NUMBERS + SETTINGS}
    return law_of(logs).bits_per_byte(trials(rows), **numbers)


def trials(rows: list[dict[str, Any]]) -> Trial:
    """Those of all rows, as arrays."""

    def column(name: str) -> np.ndarray:
        return np.array([row[f"trial_{name}"] for row in rows])

    numbers = {name: column(name) for name in ("table", "seen", "unique", "per_token")}
    return Trial(
        bits_per_byte=column("bits_per_byte").T,  # (4, rows)
        earlier=column("earlier").T,
        earlier_seen=column("earlier_seen"),
        repeated=column("repeated"),
        numbers=numbers | SAME,
    )


def errors_of(logs: np.ndarray, rows: list[dict[str, Any]]) -> np.ndarray:
    """Of the logarithms of the bits per byte; those of a group without their mean."""
    errors = np.log(predict(logs, rows)) - np.log([row["bits_per_byte"] for row in rows])
    for name in {row["group"] for row in rows} - {""}:
        members = np.array([row["group"] == name for row in rows])
        errors[members] -= errors[members].mean()
    return errors


def compare(logs: np.ndarray, rows: list[dict[str, Any]]) -> tuple[np.ndarray, ...]:
    """The bits per byte that rows reached and those predicted, and the paces that scale their errors."""
    reached = np.array([row["bits_per_byte"] for row in rows])
    return reached, predict(logs, rows), np.maximum(law_of(logs).pace(trials(rows)), STEADY)


def fit(rows: list[dict[str, Any]], rounds: int = 60) -> np.ndarray:
    """The logarithms of the constants: Levenberg and Marquardt's method with Huber's weights."""
    start, width = np.array(list(START.values())).T
    start = np.log(start)
    expected = np.array([row["error"] for row in rows])

    def residuals(logs: np.ndarray) -> np.ndarray:
        return errors_of(logs, rows) / expected

    def objective(logs: np.ndarray) -> float:
        error = np.abs(residuals(logs))
        huber = np.where(error < HUBER, error**2, 2 * HUBER * error - HUBER**2).sum()
        return float(huber + (((logs - start) / width) ** 2).sum())

    logs = start
    damping = 1.0
    best = objective(start)
    for _ in range(rounds):
        error = residuals(logs)
        jacobian = np.stack([(residuals(logs + d) - error) / 1e-5 for d in 1e-5 * np.eye(len(logs))], axis=1)
        weights = np.minimum(1, HUBER / np.maximum(np.abs(error), 1e-12))
        curvature = (jacobian * weights[:, None]).T @ jacobian + np.diag(1 / width**2)
        gradient = jacobian.T @ (weights * error) + (logs - start) / width**2
        while damping < 1e9:
            tried = logs - np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), gradient)
            if (value := objective(tried)) < best:
                logs = tried
                best = value
                damping = max(damping / 5, 1e-6)
                break
            damping *= 4
    return logs


def recipe(rows: list[dict[str, Any]]) -> None:
    """Print what other learning rates and decays did: their bits per byte over the usual ones'."""
    names = ("text", "text_bytes", "vocab_size", "context_length", "emb_dim", "num_layers", "steps")
    groups: dict[tuple[Any, ...], dict[tuple[float, float], float]] = {}
    for row in rows:
        if row["batch_tokens"] == 1536 and "rate" in row:
            found = groups.setdefault(tuple(row[name] for name in names), {})
            found[row["rate"], row["weight_decay"]] = row["bits_per_byte"]
    for key, found in groups.items():
        for (rate, decay), bits in found.items():
            if (rate, decay) != USUAL and USUAL in found:
                change = bits / found[USUAL] - 1
                print(f"{key[0]}, {key[-1]:g} steps, rate {rate:g}, decay {decay:g}: {change:+.1%}")


def main() -> None:
    """Fit, leave one kind out each time, draw and write."""
    rows = read()
    usual = [row for row in rows if (row.get("rate", 1.0), row["weight_decay"]) == USUAL]
    logs = fit(usual)
    constants = dict(zip(START, (float(f"{value:.4g}") for value in np.exp(logs)), strict=True))
    error = errors_of(logs, usual)
    print(
        f"{len(usual)} cells: median error {np.median(np.abs(error)):.1%}, nine in ten below "
        f"{np.quantile(np.abs(error), 0.9):.1%}"
    )
    errors = list[float]()
    weights = list[float]()
    runs = {}
    known = [row for row in usual if is_run(row)]
    for name in sorted({row["family"] for row in known}):
        rest = fit([row for row in usual if row["family"] != name])
        left = [row for row in known if row["family"] == name]
        reached, guessed, pace = runs[name] = compare(rest, left)
        off = np.log(guessed / reached)
        errors, weights = [*errors, *abs(off) / pace], [*weights, *np.full(len(off), 1 / len(off))]
        print(f"without {name}: {len(off)} runs, {', '.join(f'{one:+.1%}' for one in off)}")
    order = np.argsort(errors)  # each family counts once
    shares = np.cumsum(np.array(weights)[order]) / sum(weights)
    constants["error"] = float(f"{np.array(errors)[order][np.searchsorted(shares, WITHIN)]:.2g}")
    print(json.dumps(constants))
    law = Law(**constants, measured={})
    absolute = [row for row in usual if row["source"] != "regularised"]
    found = {name: [row[name] for row in absolute] for name in NUMBERS}
    found |= {"trial": trials(absolute).bits_per_byte.mean(0), "pace": law.pace(trials(absolute))}
    measured = {name: [float(min(values)), float(max(values))] for name, values in found.items()}
    write_json(ROOT / "gpt" / "assets" / "law.json", {**constants, "measured": measured})
    recipe(rows)
    reached, guessed, pace = runs[IN_NO_FIT] = compare(logs, read(HELD_BACK))
    print(
        f"{IN_NO_FIT}: {np.sum(abs(guessed / reached - 1) <= 0.04)} of {len(reached)} within 4 %, "
        f"{np.sum(abs(guessed - reached) <= constants['error'] * pace * guessed)} within the error"
    )
    draw(runs, constants["error"])


def draw(runs: dict[str, tuple[np.ndarray, ...]], error: float) -> None:
    """Predicted over reached bits per byte of the runs of each family, by a law that does not know it."""
    figure = Figure(figsize=(10, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot([0.5, 2.45], [0.5, 2.45], color="black", linewidth=0.6)
    colors = matplotlib.colormaps["tab20"].colors
    for i, (name, (reached, guessed, pace)) in enumerate(runs.items()):
        held_back = name == IN_NO_FIT
        color, marker = ("black", "*") if held_back else (colors[i % len(colors)], "os^"[i // len(colors)])
        axes.errorbar(
            reached,
            guessed,
            error * pace * guessed,
            color=color,
            marker=marker,
            linestyle="none",
            markersize=4,
            linewidth=0.7,
            label=name,
        )
    axes.set(
        xlabel="bits per byte reached", ylabel="predicted without this kind of text; nine of ten are within ±"
    )
    figure.legend(fontsize=8, ncols=2, loc="outside right upper")
    axes.grid(alpha=0.25)
    with atomic_write(ROOT / "docs" / "scaling.png", "wb") as file:
        figure.savefig(file, format="png", dpi=110)


if __name__ == "__main__":
    main()
