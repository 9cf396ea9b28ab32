"""`gpt fit --profile`: where a training step's time goes."""

import tempfile
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_only
from torch.profiler import profile, schedule

from gpt.files import atomic_write
from gpt.training.folder import RunFolder

WAIT, WARM_UP, ACTIVE = 10, 3, 5


class Profile(Callback):
    """Traces a few steps early in the run.

    Writes `profile.json`, for chrome://tracing or ui.perfetto.dev, and `profile.txt`, a table of operators.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder

    @rank_zero_only
    def on_train_start(self, *_: Any) -> None:
        steps = schedule(wait=WAIT, warmup=WARM_UP, active=ACTIVE, repeat=1)
        self._profile = profile(schedule=steps, on_trace_ready=self._write)
        self._profile.start()

    @rank_zero_only
    def on_train_batch_end(self, *_: Any) -> None:
        self._profile.step()

    @rank_zero_only
    def on_train_end(self, *_: Any) -> None:
        """Stop; a run of fewer steps than it takes leaves no trace."""
        self._profile.stop()

    def _write(self, finished: profile) -> None:
        with tempfile.TemporaryDirectory() as folder:  # torch writes to a path, and not atomically
            trace = Path(folder) / "profile.json"
            finished.export_chrome_trace(str(trace))
            with atomic_write(self.folder / trace.name, "wb") as file:
                file.write(trace.read_bytes())
        order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        table = finished.key_averages().table(sort_by=order, row_limit=40, max_name_column_width=60)
        with atomic_write(self.folder / "profile.txt") as file:
            file.write(f"{ACTIVE} steps\n{table}\n")
