"""Fit the scaling law to sweep.csv: `python scripts/scaling/fit.py`.

Writes gpt/assets/law.json and docs/scaling.png (points, curves, residuals), and prints the errors, for each
kind of text also where the law is fitted without it. Errors are of the logarithm of bits per byte; Huber's
weights keep single cells from deciding (Hoffmann et al. 2022, section 3.3).
"""

import csv
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from gpt.files import atomic_write, write_json
from gpt.plan.law import Law, Trial

ROOT, TABLE = Path(__file__).parents[2], Path(__file__).with_name("sweep.csv")
# Where the search begins, and the width of a weak prior on the logarithm of each constant.
START = {
    **{"floor": (0.3, 1.0), "blocks": (3.0, 1.5), "blocks_power": (0.3, 0.4)},
    **{"table": (3.0, 1.5), "table_power": (0.3, 0.4)},
    **{"bytes": (60.0, 2.0), "bytes_power": (0.35, 0.4), "token_power": (1.0, 1.0)},
    **{"context": (1.0, 1.5), "context_power": (0.6, 0.5), "window": (200.0, 1.0)},
    **{"passes": (10.0, 1.0), "batch": (3000.0, 1.0), "text_power": (1.0, 0.3), "repeat_power": (0.5, 1.0)},
    **{"overfit": (0.005, 2.0), "overfit_power": (1.0, 0.3), "again_power": (1.2, 0.4)},
    **{"table_overfit": (3.0, 1.0), "overfit_repeats": (2.0, 0.5)},
}
HUBER = 0.03
MOST_PASSES = 14  # cells that read a text more often have learned it by heart: few plans go there
PLANNED = 5  # a run by --minutes or by hand is what is predicted, and counts as so many cells
USUAL = 1.0, 0.4  # times the law's learning rates; weight decay
RECIPE = {"lr": 0.0076, "lr_power": -0.2, "rest_lr": 1.5, "weight_decay": USUAL[1]}  # docs/planning.md


def read() -> list[dict[str, Any]]:
    """The rows of the tables as numbers, with the law's arguments; docs/planning.md has those by hand."""
    rows: list[dict[str, Any]] = []
    for table in (TABLE, TABLE.with_name("by_hand.csv"), TABLE.with_name("planned.csv")):
        if table.exists():
            with table.open(encoding="utf-8", newline="") as file:
                for row in csv.DictReader(file):
                    words = ("text", "machine", "law", "part")
                    numbers = {name: value if name in words else float(value) for name, value in row.items()}
                    rows += [numbers] * (PLANNED if "part" in row else 1)
    for row in rows:
        width, layers, context = row["emb_dim"], row["num_layers"], row["context_length"]
        row["blocks"] = 12 * layers * width**2
        row["table"] = row["parameters"] - row["blocks"] - width * (13 * layers + context + 2)
        row["unique"], row["batch"] = row["train_bytes"], row["batch_tokens"]
        row["per_token"] = row["held_out_bytes_per_token"]
        row["context"] = context
        row["seen"] = row["steps"] * row["batch_tokens"] * row["per_token"]
        row["trial"] = [row[f"trial_{name}"] for name in TRIAL]
    return [row for row in rows if row["seen"] <= MOST_PASSES * row["unique"]]


NUMBERS = ("blocks", "table", "context", "seen", "unique", "batch", "per_token")
TRIAL = [field.name for field in fields(Trial)]


def predict(logs: np.ndarray, rows: list[dict[str, Any]]) -> np.ndarray:
    """Bits per byte by the law whose constants have these logarithms."""
    constants = dict(zip(START, np.exp(logs).tolist(), strict=True))
    law = Law(**constants, **RECIPE, measured={})
    trial = Trial(**dict(zip(TRIAL, np.array([row["trial"] for row in rows]).T, strict=True)))
    return law.bits_per_byte(trial, **{name: np.array([row[name] for row in rows]) for name in NUMBERS})


def fit(rows: list[dict[str, Any]], rounds: int = 60) -> np.ndarray:
    """The logarithms of the constants: Levenberg and Marquardt's method with Huber's weights."""
    start, width = np.array(list(START.values())).T
    start = np.log(start)
    target = np.log([row["bits_per_byte"] for row in rows])

    def residuals(logs: np.ndarray) -> np.ndarray:
        return np.log(predict(logs, rows)) - target

    def objective(logs: np.ndarray) -> float:
        error = np.abs(residuals(logs))
        huber = np.where(error < HUBER, error**2, 2 * HUBER * error - HUBER**2).sum() / HUBER**2
        return float(huber + (((logs - start) / width) ** 2).sum())

    logs, damping, best = start, 1.0, objective(start)
    for _ in range(rounds):
        error = residuals(logs)
        jacobian = np.stack([(residuals(logs + d) - error) / 1e-5 for d in 1e-5 * np.eye(len(logs))], axis=1)
        weights = np.minimum(1, HUBER / np.maximum(np.abs(error), 1e-12)) / HUBER**2
        curvature = (jacobian * weights[:, None]).T @ jacobian + np.diag(1 / width**2)
        gradient = jacobian.T @ (weights * error) + (logs - start) / width**2
        while damping < 1e9:
            tried = logs - np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), gradient)
            if (value := objective(tried)) < best:
                logs, best, damping = tried, value, max(damping / 5, 1e-6)
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
    error = np.log(predict(logs, usual)) - np.log([row["bits_per_byte"] for row in usual])
    print(
        f"{len(usual)} cells: median error {np.median(np.abs(error)):.1%}, nine in ten below "
        f"{np.quantile(np.abs(error), 0.9):.1%}"
    )
    for name in sorted({row["text"] for row in usual}):
        rest, left = ([row for row in usual if (row["text"] == name) is own] for own in (False, True))
        guesses = predict(fit(rest), left)
        reached = np.array([row["bits_per_byte"] for row in left])
        outside = np.log(guesses / reached)
        print(
            f"without {name}, {len(left)} cells: mean error {outside.mean():+.1%}, median of sizes "
            f"{np.median(np.abs(outside)):.1%}"
        )
        for minutes in sorted({row["minutes"] for row in left if "minutes" in row}):
            cells = [i for i, row in enumerate(left) if row.get("minutes") == minutes]
            off = {f"{outside[i]:+.1%}" for i in cells}
            above = reached[cells][guesses[cells].argmin()] / reached[cells].min() - 1
            print(f"  {minutes:g} minutes: {', '.join(sorted(off))}; the shape it takes: {above:+.1%}")
    print(json.dumps(constants))
    names = {n: n for n in NUMBERS} | {"trial": "trial_bits_per_byte", "repeats": "trial_repeats"}
    measured = {n: [min(row[c] for row in usual), max(row[c] for row in usual)] for n, c in names.items()}
    write_json(ROOT / "gpt" / "assets" / "law.json", {**constants, **RECIPE, "measured": measured})
    recipe(rows)
    draw(usual, logs, error)


def draw(rows: list[dict[str, Any]], logs: np.ndarray, error: np.ndarray) -> None:
    """Points with the law's curves through them, and the residuals."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for color, name in zip(
        ("#0072B2", "#D55E00", "#009E73", "#CC79A7"), sorted({r["text"] for r in rows}), strict=False
    ):
        own = [i for i, row in enumerate(rows) if row["text"] == name]
        seen = np.array([rows[i]["seen"] for i in own])
        left.scatter(seen, [rows[i]["bits_per_byte"] for i in own], s=9, color=color, label=name)
        middle = {n: float(np.median([rows[i][n] for i in own])) for n in NUMBERS}
        middle["trial"] = np.median([rows[i]["trial"] for i in own], axis=0)
        line = np.geomspace(seen.min(), seen.max(), 50)
        curve = predict(
            logs, [{**middle, "unique": max(middle["unique"], 1e6), "seen": value} for value in line]
        )
        left.plot(line, curve, color=color, linewidth=1)
        right.scatter(seen, 100 * error[own], s=9, color=color)
    left.set(xscale="log", xlabel="bytes seen", ylabel="bits per byte, held out")
    left.set_title("Points, and the law at their median shape", fontsize=10)
    left.legend(fontsize=8)
    right.axhline(0, color="black", linewidth=0.6)
    right.set(xscale="log", xlabel="bytes seen", ylabel="law over measurement, %")
    right.set_title("Residuals", fontsize=10)
    with atomic_write(ROOT / "docs" / "scaling.png", "wb") as file:
        figure.savefig(file, format="png", dpi=110)


if __name__ == "__main__":
    main()
