"""Snapshots of a run's weights, which show later how the model learned."""

from contextlib import suppress

import torch

from gpt.files import Folder
from gpt.run.folder import RunFolder
from gpt.weights.checkpoint import ModelPart, write
from gpt.weights.formats.table import Weights
from gpt.weights.runs import SNAPSHOTS, Snapshot, most_crowded, snapshot_name, snapshots_of

_FEWEST = 8  # snapshots; fewer would show little


class Snapshots:
    """Snapshots of the weights, in bfloat16, of steps 1 to 8, 10, 12, 14, 16, 20, ..., and of the last.

    All snapshots together take at most `megabytes`. The most closely spaced ones are deleted first, so the
    others stay evenly spread. If fewer than `_FEWEST` fit, none is kept. A snapshot is a checkpoint without
    the state for resuming.
    """

    def __init__(self, folder: RunFolder, megabytes: int) -> None:
        self.folder = folder
        self.most = megabytes * 1_000_000

    def remove_after(self, step: int) -> None:
        """Remove the snapshots of later steps, and what a kill has left unfinished."""
        folder = self.folder
        if SNAPSHOTS in folder.top.names():
            folder.snapshots.remove_unfinished()
            for other, _, file in snapshots_of(folder.path):
                if other > step:
                    folder.snapshots.remove(file.name)

    def is_due(self, step: int, last: bool) -> bool:
        """Whether to save a snapshot after this update."""
        return last or step % (1 << max(0, step.bit_length() - 3)) == 0

    def save(self, step: int, loss: float, weights: Weights, model: ModelPart) -> None:
        """Save a snapshot. Errors of a full disk are ignored here: the next checkpoint reports them."""
        size = sum(tensor.numel() for tensor in weights.values()) * torch.bfloat16.itemsize
        if _FEWEST * size > self.most:
            return
        small = {name: tensor.to("cpu", torch.bfloat16) for name, tensor in weights.items()}
        with suppress(OSError):
            files = self.folder.snapshots
            with files.write(snapshot_name(step, loss), "wb") as file:
                write(file, small, model, None)
            thin(files, snapshots_of(self.folder.path), self.most)


def thin(files: Folder, snapshots: list[Snapshot], most: int) -> None:
    """Delete snapshots, the most closely spaced first, until they take at most `most` bytes."""
    while len(snapshots) > 2 and sum(file.stat().st_size for *_, file in snapshots) > most:
        *_, file = snapshots.pop(most_crowded(snapshots))
        files.remove(file.name)
