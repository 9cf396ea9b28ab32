"""The checkpoints and snapshots in a run's folder: their names, which docs/start.md lists, and their order.

Only headers are read here. Which checkpoint is the newest is decided by the numbers in them and never by the
times of files, which a copy changes.
"""

import re
from contextlib import suppress
from pathlib import Path

from gpt.errors import InputError
from gpt.files import StrPath, readable
from gpt.weights.checkpoint import Order, parts_of

RUNS = Path("runs")
SUFFIX = ".safetensors"
CHECKPOINTS = "checkpoints"
"""The folder of the checkpoints, from which a run can be resumed."""
NEWEST = f"last{SUFFIX}"
"""The newest checkpoint."""
BEST = f"best{SUFFIX}"
"""The checkpoint with the lowest held-out loss."""
SNAPSHOTS = "snapshots"
"""The folder of the snapshots, which hold only weights."""
Snapshot = tuple[int, float, Path]  # step, loss of its batch in nats per token, file of the weights


def snapshot_name(step: int, loss: float) -> str:
    """Return the name of the snapshot after an update, whose loss is in nats per token."""
    return f"step-{step}-loss-{loss:.4f}{SUFFIX}"


def step_and_loss(name: str) -> tuple[int, float] | None:
    """Return what the name of a snapshot says; None for the name of another file."""
    match = re.fullmatch(rf"step-(\d{{1,15}})-loss-(\d+\.\d+|nan|inf){re.escape(SUFFIX)}", name)
    return (int(match[1]), float(match[2])) if match else None


def checkpoints_of(run: Path, *, broken_first: bool = True) -> list[Path]:
    """Return a run's checkpoints, newest first; those with unreadable headers come before or after all."""
    orders, broken = _orders(run)
    # Two names of one file are ordered by name, independent of the folder's order: `last` before `best`.
    newest_first = sorted(orders, key=lambda path: (orders[path], path.name), reverse=True)
    broken = sorted(broken, reverse=True)
    return [*broken, *newest_first] if broken_first else [*newest_first, *broken]


def newest_text(run: Path) -> str:
    """Return the hash of the training text in a run's newest checkpoint; "" if there is none."""
    for path in checkpoints_of(run, broken_first=False):
        with suppress(ValueError, OSError):
            if run_part := parts_of(path)[1]:
                return run_part.corpus
    return ""


def newest_run() -> Path | None:
    """Return the run in `runs/` with the newest checkpoint by the saved times; None if there is none.

    A run that has only broken checkpoints is the last choice.
    """
    saved: list[tuple[float, Path]] = []
    for run in RUNS.glob("*"):
        orders, broken = _orders(run)
        saved += [(saved_at, run) for _, _, saved_at in orders.values()]
        saved += [(0.0, run) for _ in broken]
    return max(saved)[1] if saved else None


def order_of(path: Path) -> Order:
    """Return the order of a checkpoint, reading only its header.

    Raises the errors of `parts_of`, and InputError for a snapshot.
    """
    _, run = parts_of(path)
    if run is None:
        raise InputError(f"{path} is a snapshot, which holds only weights")
    return run.order


def next_session(run: Path) -> int:
    """Return a number above that of every session in the run's checkpoints."""
    orders, _ = _orders(run)
    return 1 + max((session for session, _, _ in orders.values()), default=0)


def snapshots_of(run: Path) -> list[Snapshot]:
    """Return the snapshots of a run in the order of their steps."""
    files = [path for path in run.glob(f"{SNAPSHOTS}/*{SUFFIX}") if path.is_file()]
    return sorted((*told, path) for path in files if (told := step_and_loss(path.name)))


def most_crowded(snapshots: list[Snapshot]) -> int:
    """Return the index of the snapshot with the closest neighbours, by ratio of steps; never an end.

    There have to be at least three snapshots.
    """
    steps = [max(1, step) for step, _, _ in snapshots]  # a stranger's may begin at 0
    gaps = [after / before for before, after in zip(steps, steps[2:], strict=False)]
    return 1 + gaps.index(min(gaps))


def run_of(checkpoint: Path) -> Path | None:
    """Return the run's folder of a checkpoint or snapshot; None if it was moved elsewhere."""
    inside = checkpoint.suffix == SUFFIX and checkpoint.parent.name in (CHECKPOINTS, SNAPSHOTS)
    return checkpoint.parent.parent if inside else None


def model_name(given: StrPath | None, path: Path) -> str:
    """Return the name of the model at `path`, which was found for the `given` name or path."""
    if given is not None and not Path(given).exists():  # the hub's cache names the folder by its commit
        return readable(str(given))
    if run := run_of(path.resolve()):
        return readable(run.name)
    path = Path(path if given is None else given).resolve()  # not a file in the folder that is given
    return readable(path.name if path.is_dir() else path.stem)


def _orders(run: Path) -> tuple[dict[Path, Order], list[Path]]:
    """Return the order of each checkpoint of a run, and the checkpoints whose header cannot be read.

    Those of a later version are among the latter: whoever then reads them says so. Nothing is raised.
    """
    orders: dict[Path, Order] = {}
    broken: list[Path] = []
    for path in run.glob(f"{CHECKPOINTS}/*{SUFFIX}"):
        if not path.is_file():
            continue
        try:
            orders[path] = order_of(path)
        except (ValueError, OSError):
            broken.append(path)
    return orders, broken
