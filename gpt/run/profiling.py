"""`gpt fit --profile`: where a training step's time goes."""

import tempfile
from pathlib import Path

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.utilities import rank_zero_only
from torch.profiler import profile, schedule

from gpt.files import atomic_write
from gpt.run.folder import RunFolder

WAIT, WARM_UP, ACTIVE = 10, 3, 5


def profiler(folder: RunFolder) -> Callback:
    """A callback that traces a few steps early in the run; one of fewer steps leaves no trace.

    Writes `profile.json`, for chrome://tracing or ui.perfetto.dev, and `profile.txt`, a table of operators.
    """

    def write(finished: profile) -> None:
        with tempfile.TemporaryDirectory() as place:  # torch writes to a path, and not atomically
            trace = Path(place) / "profile.json"
            finished.export_chrome_trace(str(trace))
            with atomic_write(folder / trace.name, "wb") as file:
                file.write(trace.read_bytes())
        order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        table = finished.key_averages().table(sort_by=order, row_limit=40, max_name_column_width=60)
        with atomic_write(folder / "profile.txt") as file:
            file.write(f"{ACTIVE} steps\n{table}\n")

    steps = schedule(wait=WAIT, warmup=WARM_UP, active=ACTIVE, repeat=1)
    tracing = profile(schedule=steps, on_trace_ready=write)
    return LambdaCallback(
        on_train_start=rank_zero_only(lambda *_: tracing.start()),
        on_train_batch_end=rank_zero_only(lambda *_: tracing.step()),
        on_train_end=rank_zero_only(lambda *_: tracing.stop()),
    )
