"""Pictures of a run: the loss curve, drawn from the run's metrics.csv."""

import csv
import os
from pathlib import Path

from gpt.errors import InputError
from gpt.files import atomic_write

# Okabe and Ito's palette: told apart by colour-blind readers, and in grey.
TRAIN_COLOUR, VAL_COLOUR = "#56B4E9", "#D55E00"


def read_column(metrics: str | os.PathLike[str], x: str, y: str) -> tuple[list[float], list[float]]:
    """The rows of a metrics.csv that have both columns.

    Raises:
        InputError: the file or a column is missing.
    """
    try:
        with open(metrics, encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except FileNotFoundError:
        raise InputError(f"no metrics at {metrics}, expected the metrics.csv of a run") from None
    columns = list(rows[0]) if rows else []
    for name in (x, y):
        if rows and name not in columns:
            raise InputError(f"{metrics} has no column {name}, it has {', '.join(columns)}")
    points = [(float(row[x]), float(row[y])) for row in rows if row[x] and row[y]]
    return [point[0] for point in points], [point[1] for point in points]


def loss_curve(metrics: str | os.PathLike[str], picture: str | os.PathLike[str], title: str) -> None:
    """Draw training and validation loss over steps, in nats per token, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    train, val = read_column(metrics, "step", "train_loss"), read_column(metrics, "step", "val_loss")
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(*train, color=TRAIN_COLOUR, linewidth=1.2, label="training")
    axes.plot(*val, color=VAL_COLOUR, marker="o", markersize=5, linewidth=1.8, label="held-out text")
    if val[1]:
        axes.annotate(
            f"{val[1][-1]:.3f}",
            (val[0][-1], val[1][-1]),
            xytext=(0, 9),
            textcoords="offset points",
            ha="right",
            color=VAL_COLOUR,
            weight="bold",
        )
    axes.set(title=title, xlabel="step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    with atomic_write(Path(picture), "wb") as file:
        figure.savefig(file, format="png", dpi=120)
