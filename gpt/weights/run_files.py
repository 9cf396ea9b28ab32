"""The names in a run's folder that other parts of the program have to know; docs/start.md lists them all."""

import re

SUFFIX = ".safetensors"
CHECKPOINTS = "checkpoints"
"""The folder of the checkpoints, from which a run can be resumed."""
NEWEST = f"last{SUFFIX}"
"""The newest checkpoint."""
BEST = f"best{SUFFIX}"
"""The checkpoint with the lowest held-out loss."""
SNAPSHOTS = "snapshots"
"""The folder of the snapshots, which hold only weights."""
BASE = "base"
"""The folder of the weights that adapters change."""


def snapshot_name(step: int, loss: float) -> str:
    """Return the name of the snapshot after an update, whose loss is in nats per token."""
    return f"step-{step}-loss-{loss:.4f}{SUFFIX}"


def step_and_loss(name: str) -> tuple[int, float] | None:
    """Return what the name of a snapshot says; None for the name of another file."""
    match = re.fullmatch(rf"step-(\d{{1,15}})-loss-(\d+\.\d+|nan|inf){re.escape(SUFFIX)}", name)
    return (int(match[1]), float(match[2])) if match else None
