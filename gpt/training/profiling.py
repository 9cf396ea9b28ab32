"""`gpt fit --profile`: where a training step's time goes."""

import tempfile
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.profiler import ProfilerActivity, profile, schedule

from gpt.files import atomic_write
from gpt.training.folder import RunFolder

WAIT, WARM_UP, ACTIVE = 10, 3, 5


class Profile(Callback):
    """Traces a few steps early in the run.

    Writes `profile.json` into the run's folder, for chrome://tracing or ui.perfetto.dev, and `profile.txt`, a
    table of operators by time.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self._profile: profile | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to count steps."""
        if not trainer.is_global_zero:
            return
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        self._profile = profile(
            activities=activities,
            schedule=schedule(wait=WAIT, warmup=WARM_UP, active=ACTIVE, repeat=1),
            on_trace_ready=self._write,
        )
        self._profile.start()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count a step."""
        if self._profile is not None:
            self._profile.step()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop; a run of fewer steps than it takes leaves no trace."""
        if self._profile is not None:
            self._profile.stop()
            self._profile = None

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
