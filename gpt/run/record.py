"""The record of a run: metrics.csv, loggers, samples.txt, progress on stderr, the figures of summary.json."""

import math
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor

from gpt.config import USUAL_TEMPERATURE, USUAL_TOP_K
from gpt.data.module import TokenData
from gpt.model import GPT
from gpt.plain import LARGEST
from gpt.progress import progress, report
from gpt.run.appended import Appended, kept_rows, kept_samples, with_columns
from gpt.run.folder import RunFolder
from gpt.run.loggers import Ending, close_logger
from gpt.run.options import Options
from gpt.run.summary import Summary
from gpt.training.module import VALIDATED
from gpt.weights.checkpoint import RunPart

COLUMNS = (
    "step",
    "tokens",
    "seconds",
    "train_loss",
    "learning_rate",
    "gradient_norm",
    "tokens_per_second",
    *VALIDATED,
)


class Record:
    """The record of a run: a row of metrics.csv every `log_every` updates and at each validation.

    It keeps its counts in `run`, whose windows have `window` tokens. Each row also goes to `loggers`.

    Losses between two rows are summed on the device, because reading one would wait for the device. Only the
    first process writes and prints; the others have no `folder`.
    """

    def __init__(
        self,
        folder: RunFolder | None,
        run: RunPart,
        options: Options,
        window: int,
        loggers: Sequence[Logger] = (),
    ) -> None:
        self.run = run
        self.every = options.log_every
        self.window = window
        self.loss_sum = torch.tensor(0.0)
        self._open = ExitStack()  # the files and the progress bar
        self._loggers = loggers
        self._paused_at = 0.0  # seconds of the run when it was paused
        self._step = run.step  # step of the last row
        self._place = run.place  # windows of the text that were used by then
        self._at = time.perf_counter()
        self._started = self._at - run.seconds
        self.first = folder is not None
        if folder is None:
            return
        table, self._columns = with_columns(kept_rows(folder, run), COLUMNS)
        samples = kept_samples(folder, run)
        bar = progress("training", run.known_total, done=run.step, unit="steps")
        with ExitStack() as opened:
            self._metrics = opened.enter_context(Appended(folder.top, "metrics.csv", table))
            self._samples = opened.enter_context(Appended(folder.top, "samples.txt", samples))
            self._advance: Callable[..., None] = opened.enter_context(bar)
            self._open = opened.pop_all()

    @property
    def tokens(self) -> int:
        """Tokens that all processes together have trained on."""
        return self.run.place * self.window

    def elapsed(self) -> float:
        """Seconds of training and validation, over all resumes."""
        return time.perf_counter() - self._started

    def add_batch(self, loss: Tensor) -> None:
        """Count a batch and add its loss."""
        self.loss_sum = self.loss_sum + loss
        self.run.batches += 1

    def is_due(self) -> bool:
        """Whether to write a row after this update."""
        return self.run.step % self.every == 0 or self.run.step == self.run.total

    def write_row(self, loss: float, rate: float, norm: float) -> None:
        """Write a row with the mean loss since the last row."""
        run = self.run
        self.loss_sum = torch.zeros_like(self.loss_sum)
        run.batches = 0
        if not self.first:
            return
        made = run.step - self._step
        tokens = (run.place - self._place) * self.window
        self._step = run.step
        self._place = run.place
        before = self._at
        self._at = time.perf_counter()
        speed = tokens / (self._at - before)
        figures = {"train_loss": loss, "learning_rate": rate, "gradient_norm": norm}
        self._row({**figures, "tokens_per_second": speed})
        self._advance(made, f"loss {loss:.3f}, {speed:,.0f} tokens/s", run.known_total)

    def pause(self) -> None:
        """Begin a validation, which counts as time but not as training."""
        self._paused_at = self.elapsed()

    def go_on(self) -> float:
        """End the validation, and return the seconds that it has taken; the speed leaves them out."""
        seconds = self.elapsed() - self._paused_at
        self._at += seconds
        return seconds

    def validated(
        self, figures: dict[str, float], model: GPT, data: TokenData, temperature: float = 1.0
    ) -> None:
        """Write a validation's figures, and a sample generated from an empty prompt with a fixed seed.

        The sample's logits are divided by the temperature, as they are wherever the checkpoint is used.
        """
        from gpt.generation import Sampling, stream_samples

        run = self.run
        # JSON has neither NaN nor infinity: both fail this comparison.
        run.validation = {name: value if abs(value) <= LARGEST else None for name, value in figures.items()}
        if not self.first:
            return
        self._row(figures)
        if not math.isfinite(figures["val_loss"]):  # nothing can be drawn, and the next update is refused
            report(f"step {run.step}: {scores(figures)}", prefix="")
            return
        sampling = Sampling(temperature=USUAL_TEMPERATURE * temperature, top_k=USUAL_TOP_K)
        pieces = stream_samples(model, data.tokenizer, "", sampling=sampling, max_new_tokens=64, seed=0)
        text = "".join(piece for _, piece in pieces).strip()
        self._samples.append(f"--- step {run.step}\n{text}\n\n")
        report(f"step {run.step}: {scores(figures)}; a sample:", textwrap.indent(text, "  "), prefix="")

    def note(self) -> None:
        """Note in `run` what a checkpoint keeps: the seconds, and the files' sizes after a flush to disk."""
        self.run.seconds = self.elapsed()
        if self.first:
            self.run.csv, self.run.csv_sum = self._metrics.flush()
            self.run.samples, self.run.samples_sum = self._samples.flush()

    def close(self, ending: Ending) -> None:
        """Remove the progress bar, close the files, and tell the loggers how the run has ended."""
        self._open.close()
        for logger in self._loggers:
            close_logger(logger, ending)

    def summary(self, device: torch.device, precision: str, parameters: int) -> Summary:
        """Return the figures of the run; sizes are in bytes."""
        run = self.run
        return {
            "text": run.text,
            "val_loss": run.validation.get("val_loss"),
            "val_bits_per_byte": run.validation.get("val_bits_per_byte"),
            "val_standard_error": run.validation.get("val_standard_error"),
            "best_loss": run.best_loss,
            "best_step": run.best_step,
            "train_seconds": round(run.seconds, 2),
            "steps": run.step,
            "tokens": self.tokens,
            "tokens_per_second": round(self.tokens / max(run.seconds, 1e-9)),
            "peak_memory_bytes": _peak_memory_bytes(device),
            "parameters": parameters,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "precision": precision,
        }

    def _row(self, figures: dict[str, float]) -> None:
        figures = {"step": self.run.step, "tokens": self.tokens, "seconds": self.elapsed(), **figures}
        cells = (_cell(figures[name]) if name in figures else "" for name in self._columns)
        self._metrics.append(f"{','.join(cells)}\n")
        for logger in self._loggers:
            logger.log_metrics(figures, step=self.run.step)


def _cell(value: float) -> str:
    """Return a number for metrics.csv: a count with all its digits, anything else with eight."""
    return str(value) if isinstance(value, int) else f"{value:.8g}"


def scores(figures: dict[str, float]) -> str:
    """Return a validation's figures in words, the most useful first."""
    told = [f"{figures['val_bits_per_byte']:.3f}"] if "val_bits_per_byte" in figures else []
    if told and figures.get("val_standard_error"):
        told.append(f"± {figures['val_standard_error']:.2g}")
    bits = f"{' '.join(told)} bits per byte of held-out text, " if told else ""
    perplexity = f", perplexity {figures['val_perplexity']:.4g}" if "val_perplexity" in figures else ""
    return f"{bits}held-out loss {figures['val_loss']:.4g}{perplexity}"


def _peak_memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return 0  # Windows: the standard library cannot tell
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB
