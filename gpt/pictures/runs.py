"""`gpt plot` and loss.png: draw the losses in a run's metrics.csv."""

import csv
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from gpt.errors import InputError
from gpt.files import check_free
from gpt.pictures.figures import finish, legend_label, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's palette for all kinds of colour vision, without its yellow, which is too light on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")

X = Literal["step", "tokens", "seconds"]


@dataclass
class Metrics:
    """The rows of a run's metrics.csv. A cell is empty if the row has no value for it."""

    name: str
    rows: list[dict[str, str]]

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "Metrics":
        """Read the metrics.csv of a run folder, or the file itself.

        Raises InputError if there is none, or it has no rows.
        """
        file = Path(path) / "metrics.csv" if Path(path).is_dir() else Path(path)
        if not file.is_file():
            raise InputError(f"no metrics at {file}, expected the metrics.csv of a run")
        try:
            with open(file, encoding="utf-8", newline="") as opened:
                rows = list(csv.DictReader(opened, restkey=""))
        except (UnicodeDecodeError, csv.Error) as error:
            raise InputError(f"{file} is no metrics.csv of a run: {error}") from None
        if not rows:
            raise InputError(f"{file} has no rows yet")
        return cls(file.resolve().parent.name, rows)

    def points(self, x: str, y: str) -> tuple[list[float], list[float]]:
        """Return columns `x` and `y` of the rows that have finite values in both.

        Raises InputError if there is no column `x`, or a value is no number.
        """
        if x not in self.rows[0]:
            raise InputError(f"the metrics of {self.name} have no column {x}, only {', '.join(self.rows[0])}")
        try:
            points = [(float(row[x]), float(row[y])) for row in self.rows if row[x] and row.get(y)]
        except ValueError as error:
            raise InputError(f"the metrics of {self.name} are invalid: {error}") from None
        points = [point for point in points if all(map(math.isfinite, point))]
        return [point[0] for point in points], [point[1] for point in points]

    def bits_per_nat(self) -> float | None:
        """Return the factor from nats per token to bits per byte; None if the run has no bits per byte.

        Both figures of a validation are sums over the same held-out text. So their ratio depends only on the
        text and the vocabulary. A token of training text has about as many bytes, so the factor fits it too.
        """
        for row in reversed(self.rows):
            try:
                loss = float(row.get("val_loss") or "nan")
                bits = float(row.get("val_bits_per_byte") or "nan")
            except ValueError:
                return None
            if math.isfinite(loss) and math.isfinite(bits) and loss > 0:
                return bits / loss
        return None


def plot(runs: list[str], output: Path = Path("runs.png"), x: X = "step") -> None:
    """Draw the losses of runs in one picture.

    Args:
        runs: run folders, or metrics.csv files.
        output: the picture to write, .png or .svg.
        x: the x axis: step, tokens or seconds.
    """
    if not runs:
        raise InputError("name the runs to draw: gpt plot runs/quick runs/quick-2")
    check_free(output)
    save(compare([Metrics.read(run) for run in runs], x), output)
    print(f"{output} shows {', '.join(runs)}")


def loss_curve(metrics: str | os.PathLike[str], picture: str | os.PathLike[str]) -> None:
    """Draw a run's training loss and held-out loss over steps, as .png or .svg."""
    save(compare([Metrics.read(metrics)]), picture)


def compare(runs: Sequence[Metrics], x: X = "step") -> "Figure":
    """Draw runs in one picture. The unit is bits per byte if all runs have it, else nats per token.

    Each run has its own colour. A thin line is the training loss, and a line with dots the held-out loss. If
    there are several runs, the legend names each with its last held-out loss.
    """
    from matplotlib.figure import Figure

    in_bits = all(run.bits_per_nat() is not None for run in runs)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for run, colour in zip(runs, cycle(COLOURS)):
        scale = (run.bits_per_nat() or 1.0) if in_bits else 1.0
        train_x, train_loss = run.points(x, "train_loss")
        held_out_x, held_out_loss = run.points(x, "val_loss")
        train_loss = [scale * loss for loss in train_loss]
        held_out_loss = [scale * loss for loss in held_out_loss]
        train_label, held_out_label = _labels(run, held_out_loss, alone=len(runs) == 1)
        axes.plot(train_x, train_loss, color=colour, linewidth=1.0, alpha=0.45, label=train_label)
        axes.plot(
            held_out_x,
            held_out_loss,
            color=colour,
            linewidth=2.0,
            marker="o",
            markersize=4.5,
            label=held_out_label,
        )
    if len(runs) > 1:
        axes.set_title("Held-out loss (dots) and training loss (thin)")
    axes.set_ylabel("loss (bits per byte)" if in_bits else "loss (nats per token)")
    finish(axes, "seconds of training" if x == "seconds" else x)
    return figure


def _labels(run: Metrics, held_out_loss: list[float], alone: bool) -> tuple[str | None, str]:
    """Return the legend's texts for a run's training loss and held-out loss.

    None means no entry in the legend.
    """
    last = f": {held_out_loss[-1]:.3f}" if held_out_loss else ""
    if alone:
        return "training loss", f"held-out loss{last}"
    return None, legend_label(run.name) + last
