"""`gpt runs`: print a table of the runs, the newest first."""

import time
from contextlib import suppress
from pathlib import Path

from gpt.errors import InputError
from gpt.plain import shown
from gpt.progress import aligned, spell_out_controls
from gpt.weights.checkpoint import RunPart, parts_of
from gpt.weights.figures import bits_of_best
from gpt.weights.runs import RUNS, checkpoints_of

_HEADINGS = ("run", "text", "bits per byte", "steps", "minutes", "saved")
_LEFT_ALIGNED = 2  # columns


def runs(folder: Path = RUNS) -> None:
    """List the runs of a folder, the newest first, with their text, result, time and date.

    Args:
        folder: where the runs are.
    """
    found = read_runs(folder)
    if not found:
        raise InputError(f"no run in {shown(str(folder))}: start one with 'gpt fit'")
    print("\n".join(table(found)))


def read_runs(folder: Path) -> list[tuple[str, RunPart]]:
    """Return the names of the runs in a folder and their newest readable checkpoints, the newest first."""
    found: list[tuple[str, RunPart]] = []
    for run in folder.glob("*"):
        for path in checkpoints_of(run, broken_first=False):
            with suppress(InputError, OSError):
                part = parts_of(path)[1]
                if part is not None:
                    found.append((run.name, part))
                    break
    return sorted(found, key=lambda named: (named[1].saved_at, named[0]), reverse=True)


def table(named: list[tuple[str, RunPart]]) -> list[str]:
    """Return the lines of a table with aligned columns."""
    return aligned([_HEADINGS, *(_cells(name, run) for name, run in named)], left=_LEFT_ALIGNED)


def _cells(name: str, run: RunPart) -> tuple[str, ...]:
    """Return the texts for the columns of `_HEADINGS`; the bits are those of the best checkpoint."""
    bits = bits_of_best(
        run.validation.get("val_bits_per_byte"), run.validation.get("val_loss"), run.best_loss
    )
    return (
        spell_out_controls(name),
        spell_out_controls(run.text),
        "" if bits is None else f"{bits:.3f}",
        f"{run.step}" if run.known_total in (None, run.step) else f"{run.step} of {run.known_total}",
        f"{run.seconds / 60:.1f}",
        time.strftime("%Y-%m-%d %H:%M", time.localtime(run.saved_at)),
    )
