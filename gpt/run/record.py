"""Records of a run: metrics.csv, loggers, samples.txt, the progress on stderr, the figures of summary.json.

A resumed run continues its records as they were when its checkpoint was written; later rows are dropped. It
writes new files instead of appending to old ones, so a link in their place changes nothing elsewhere.
"""

import csv
import io
import json
import math
import os
import sys
import textwrap
import time
import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import IO, Literal

import torch
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor

from gpt.config import USUAL_TEMPERATURE, USUAL_TOP_K
from gpt.data.module import TokenData
from gpt.errors import InputError
from gpt.files import Folder
from gpt.model import GPT
from gpt.plain import LARGEST
from gpt.progress import progress, report
from gpt.run.folder import RunFolder
from gpt.run.options import Options
from gpt.run.summary import Summary
from gpt.training.module import VALIDATED
from gpt.weights.checkpoint import RunPart

Ending = Literal["success", "aborted", "failed"]
"""The end of a run: by its limits, by a signal, by an error."""
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


_WANDB_ID = "run-id"  # a file in the run's folder `wandb`


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
        table, self._columns = with_columns(kept_rows(folder, run))
        samples = kept_samples(folder, run)
        bar = progress("training", run.total, done=run.step, unit="steps")
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
        self._advance(made, f"loss {loss:.3f}, {speed:,.0f} tokens/s", run.total)

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
        cells = (f"{figures[name]:.8g}" if name in figures else "" for name in self._columns)
        self._metrics.append(f"{','.join(cells)}\n")
        for logger in self._loggers:
            logger.log_metrics(figures, step=self.run.step)


def scores(figures: dict[str, float]) -> str:
    """Return a validation's figures in words, the most useful first."""
    told = [f"{figures['val_bits_per_byte']:.3f}"] if "val_bits_per_byte" in figures else []
    if told and figures.get("val_standard_error"):
        told.append(f"± {figures['val_standard_error']:.2g}")
    bits = f"{' '.join(told)} bits per byte of held-out text, " if told else ""
    perplexity = f", perplexity {figures['val_perplexity']:.4g}" if "val_perplexity" in figures else ""
    return f"{bits}held-out loss {figures['val_loss']:.4g}{perplexity}"


class Appended:
    """A file that a run appends to: a new file, which begins with the `kept` part of the old one."""

    def __init__(self, folder: Folder, name: str, kept: bytes) -> None:
        with folder.write(name, "wb") as file:
            file.write(kept)
        self._file: IO[bytes] = os.fdopen(folder.open(name, os.O_WRONLY | os.O_APPEND), "ab")
        self._size = len(kept)
        self._sum = zlib.crc32(kept)

    def __enter__(self) -> "Appended":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, text: str) -> None:
        """Append text, at once visible to readers of the file."""
        data = text.encode("utf-8", "backslashreplace")
        self._file.write(data)
        self._file.flush()
        self._size += len(data)
        self._sum = zlib.crc32(data, self._sum)

    def flush(self) -> tuple[int, int]:
        """Flush the file to disk; return its size in bytes and its CRC-32."""
        os.fsync(self._file.fileno())
        return self._size, self._sum


def kept_rows(folder: RunFolder, run: RunPart) -> bytes:
    """Return the content of metrics.csv when `run` was saved.

    The saved CRC-32 identifies it: in this file, or in one that was set aside when the run was resumed from
    an older checkpoint. If no file matches (its columns have changed since, or an earlier version saved no
    CRC-32), it is the complete rows up to the step.
    """
    for data in _records(folder, "metrics.csv"):
        if zlib.crc32(data[: run.csv]) == run.csv_sum:
            return data[: run.csv]
    lines = next(_records(folder, "metrics.csv"), b"").splitlines(keepends=True)
    kept = lines[:1]
    for line in lines[1:]:
        step = line.partition(b",")[0]
        whole = line.endswith(b"\n") and line.count(b",") == kept[0].count(b",") and step.isdigit()
        if not whole or int(step) > run.step:
            break
        kept.append(line)
    return b"".join(kept)


def kept_samples(folder: RunFolder, run: RunPart) -> bytes:
    """Return the content of samples.txt when `run` was saved, found like `kept_rows`."""
    for data in _records(folder, "samples.txt"):
        if zlib.crc32(data[: run.samples]) == run.samples_sum:
            return data[: run.samples]
    return next(_records(folder, "samples.txt"), b"")[: run.samples]


def with_columns(table: bytes) -> tuple[bytes, tuple[str, ...]]:
    """Return a table with this version's columns first, then an earlier version's others, and all names."""
    head = ",".join(COLUMNS)
    text = table.decode("utf-8", "replace")
    if not text:
        return f"{head}\n".encode(), COLUMNS
    rows = csv.DictReader(io.StringIO(text))
    names = tuple(rows.fieldnames or ())
    if names[: len(COLUMNS)] == COLUMNS:
        return table, names
    columns = (*COLUMNS, *(name for name in names if name not in COLUMNS))
    changed = io.StringIO()
    writer = csv.DictWriter(changed, columns, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return changed.getvalue().encode(), columns


def _records(folder: RunFolder, name: str) -> Iterator[bytes]:
    """Yield the contents of the file of this name, and of those set aside with a checkpoint."""
    if name in folder.top.names():
        yield folder.top.read(name)
    for other in folder.checkpoints.names():
        if other.endswith(f".{name}"):
            yield folder.checkpoints.read(other)


def open_loggers(names: str, folder: RunFolder, run: RunPart) -> list[Logger]:
    """Open the loggers of a run beside metrics.csv, and tell them the run's options.

    `names` is the option `trainer.logger`. A resumed run goes on in the logs of its folder. Raises InputError
    if a logger cannot start.
    """
    loggers = []
    for name in names.split(","):
        try:
            if name != "csv":
                loggers.append(_logger(name, folder, run))
        except (InputError, OSError):
            raise
        except ImportError:
            raise InputError(f"the logger {name} needs a package: pip install {name}") from None
        except Exception as error:  # any of its package, such as a missing key
            raise InputError(f"the logger {name} cannot start: {' '.join(str(error).split())}") from None
    return loggers


def close_logger(logger: Logger, ending: Ending) -> None:
    """Tell a logger how the run has ended."""
    logger.finalize(ending)
    if isinstance(logger, WandbLogger):  # whose `finalize` leaves the run open until the process ends
        logger.experiment.finish(exit_code=0 if ending == "success" else 1)


def _logger(name: str, folder: RunFolder, run: RunPart) -> Logger:
    """Open a logger, and tell it the run's options."""
    path = folder.path
    options = json.loads(json.dumps(run.options))  # lists for tuples, which YAML has not
    with folder.top.below(name) as files:  # raises InputError if it is a link
        if name == "wandb":
            wandb = WandbLogger(name=path.name, save_dir=path, id=_wandb_id(files))
            wandb.log_hyperparams(options)
            return wandb
        board = TensorBoardLogger(path, "tensorboard", "", purge_step=run.step + 1)  # keeps this step
        # Its table needs a metric, by default a constant -1.
        board.log_hyperparams(options, {"step": run.step}, step=run.step)
        return board


def _wandb_id(files: Folder) -> str:
    """Return the run's name at Weights & Biases; its first start chooses it and keeps it in a file."""
    if not files.is_file(_WANDB_ID):
        with files.write(_WANDB_ID) as file:
            file.write(uuid.uuid4().hex)
    return files.read(_WANDB_ID).decode()


def _peak_memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return 0  # Windows: the standard library cannot tell
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB
