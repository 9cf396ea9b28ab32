"""`gpt runs`: print a table of the runs, the newest first."""

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpt.errors import InputError
from gpt.plain import shown
from gpt.progress import aligned, spell_out_controls
from gpt.weights.checkpoint import RunPart, parts_of
from gpt.weights.figures import bits_of_best
from gpt.weights.runs import RUNS, checkpoints_of

_HEADINGS = ("run", "text", "bits per byte", "steps", "minutes", "saved")
_LEFT_ALIGNED = 2  # columns


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of the table: a run by its newest checkpoint."""

    name: str
    text: str
    """The corpus; of a path only the last part."""
    bits_per_byte: float | None
    """Bits per byte of held-out text, of the best checkpoint; None before the first validation."""
    step: int
    total: int | None
    """Steps made, and steps planned; None before a run with a time limit knows its speed."""
    seconds: float
    """Seconds of training and validation."""
    saved_at: float
    """When the checkpoint was written, in seconds since 1970 (UTC)."""

    @classmethod
    def of(cls, name: str, run: RunPart) -> "Row":
        """Return the row of the run with this name."""
        return cls(
            name=name,
            text=run.text,
            bits_per_byte=bits_of_best(
                run.validation.get("val_bits_per_byte"), run.validation.get("val_loss"), run.best_loss
            ),
            step=run.step,
            total=run.known_total,
            seconds=run.seconds,
            saved_at=run.saved_at,
        )

    def cells(self) -> tuple[str, ...]:
        """Return the texts for the columns of `_HEADINGS`."""
        bits = "" if self.bits_per_byte is None else f"{self.bits_per_byte:.3f}"
        steps = f"{self.step}" if self.total in (None, self.step) else f"{self.step} of {self.total}"
        saved = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.saved_at))
        return (
            spell_out_controls(self.name),
            spell_out_controls(self.text),
            bits,
            steps,
            f"{self.seconds / 60:.1f}",
            saved,
        )


def runs(folder: Path = RUNS) -> None:
    """List the runs of a folder, the newest first, with their text, result, time and date.

    Args:
        folder: where the runs are.
    """
    rows = read_rows(folder)
    if not rows:
        raise InputError(f"no run in {shown(str(folder))}: start one with 'gpt fit'")
    print("\n".join(table(rows)))


def read_rows(folder: Path) -> list[Row]:
    """Return the rows of the runs in a folder that have a checkpoint, the newest first."""
    rows = []
    for run in folder.glob("*"):
        for path in checkpoints_of(run, broken_first=False):
            with suppress(InputError, OSError):
                part = parts_of(path)[1]
                if part is not None:
                    rows.append(Row.of(run.name, part))
                    break
    return sorted(rows, key=lambda row: (row.saved_at, row.name), reverse=True)


def table(rows: list[Row]) -> list[str]:
    """Return the lines of a table with aligned columns."""
    return aligned([_HEADINGS, *(row.cells() for row in rows)], left=_LEFT_ALIGNED)
