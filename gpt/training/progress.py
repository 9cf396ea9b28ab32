"""The progress bar: loss, tokens per second and the time left; outside a terminal, an occasional line."""

import time
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from gpt.training.record import Meter, Samples

SECONDS_BETWEEN_LINES = 10.0


class RunProgress(ProgressBar):
    """Shows a run's progress, figures and newest sample; `meter` and `samples` are callbacks before it."""

    def __init__(self, meter: Meter, samples: Samples) -> None:
        super().__init__()
        self.meter, self.samples = meter, samples
        self.console = Console(stderr=True, highlight=False)
        self._progress: Progress | None = None
        self._started = self._last_line = 0.0
        self._first_step = 0

    def disable(self) -> None:
        """Show nothing; Lightning calls this on all processes but the first."""
        self.console.quiet = True

    def enable(self) -> None:
        """Show again."""
        self.console.quiet = False

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Start the bar."""
        self._started = self._last_line = time.perf_counter()
        self._first_step = trainer.global_step
        if self.console.quiet or not self.console.is_terminal:
            return
        figures, time_left = TextColumn("{task.fields[figures]}"), (TimeRemainingColumn(), TextColumn("left"))
        columns = TextColumn("training"), BarColumn(), MofNCompleteColumn(), figures, *time_left
        self._progress = Progress(*columns, console=self.console, refresh_per_second=4)
        done, total = trainer.global_step, pl_module.planned_steps
        self._progress.add_task("training", total=total, completed=done, figures="")
        self._progress.start()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        """Move the bar at each logging interval; outside a terminal print a line every ten seconds."""
        step = trainer.global_step
        if step != self.meter.steps or step % self.meter.every:
            return
        figures = f"loss {self.meter.train_loss:.3f}  {self.meter.tokens_per_second:,.0f} tokens/s"
        total = pl_module.planned_steps  # an estimate, where time is the limit
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=step, total=total, figures=figures)
            return
        now = time.perf_counter()
        if now - self._last_line < SECONDS_BETWEEN_LINES:
            return
        self._last_line = now
        left = (now - self._started) / max(1, step - self._first_step) * (total - step)
        self.console.print(f"step {step}/{total}  {figures}  {left:.0f} s left", soft_wrap=True)

    def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
        """Print the validation metrics and the sample."""
        figures = "  ".join(f"{name} {value:.4g}" for name, value in self.meter.last_validation.items())
        self.console.print(f"[bold]step {trainer.global_step}[/]  {figures}", soft_wrap=True)
        if self.samples.newest:
            self.console.print(self.samples.newest, style="dim", markup=False)

    def teardown(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Stop the bar."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
