"""The options of a run: dataclasses of numbers and text. No option names code to import or execute.

The docstring below a field is its help, of which `gpt fit --help` shows the first sentence. "Rare." moves an
option from there to docs/options.md. "Elsewhere:" lists the names that other programs use for it.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import NamedTuple, get_type_hints

from docstring_parser import parse_from_object

from gpt.data.options import DataOptions
from gpt.errors import InputError, check_least
from gpt.plain import seconds_of, shown
from gpt.run.folder import folder_of
from gpt.training.device import Precision
from gpt.training.options import ModelOptions
from gpt.weights.load import Accelerator

LOGGERS = ("csv", "tensorboard", "wandb")
_USUAL_INTERVAL = 400


@dataclass(frozen=True, kw_only=True)
class TrainerOptions:
    """Options of the training loop; InputError for a value out of its range."""

    max_steps: int = -1
    """Optimizer steps to make; -1 for no such limit. The first of several limits ends the run.
    Elsewhere: max_iters, lr_decay_iters, steps, fast_dev_run."""
    max_epochs: int = -1
    """Epochs: how often the text is read; -1 for no such limit. Elsewhere: num_train_epochs, epochs."""
    max_time: str | None = None
    """Training time over all resumes: 90s, 10m, 8h, or DD:HH:MM:SS."""
    val_check_interval: int | None = None
    """Steps between two validations, by default a fifth of --trainer.max_steps, at most 400.
    Elsewhere: eval_interval, eval_steps, check_val_every_n_epoch."""
    accumulate_grad_batches: int = 1
    """Batches whose gradients are averaged before each optimizer step.

    Elsewhere: gradient_accumulation_steps."""
    gradient_clip_val: float | None = 1.0
    """The largest norm of all gradients together; 0 or null clips none.
    Elsewhere: grad_clip, max_grad_norm."""
    accelerator: Accelerator = "auto"
    """Where the run computes. Elsewhere: device."""
    precision: Precision | None = None
    """Number type of matrix products, by default what suits the device; weights are float32.
    Elsewhere: dtype, fp16, bf16."""
    devices: int | None = None
    """Processes on this machine, each with one device; by default 1, or as many as torchrun has started."""
    logger: str = "csv"
    """Where the loss curve goes beside metrics.csv: csv, tensorboard, wandb, or several with commas.
    Elsewhere: report_to, callbacks."""
    deterministic: bool = False
    """Make a GPU compute the same bits each time. Rare."""

    @property
    def processes(self) -> int:
        """The processes on this machine: as asked for, or as many as torchrun has started."""
        return self.devices or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def __post_init__(self) -> None:
        for name in ("max_steps", "max_epochs"):
            value = getattr(self, name)
            if value < -1 or value == 0:
                raise InputError(f"{name} must be positive, or -1 for no limit, got {value}")
        if self.max_seconds is not None and self.max_seconds <= 0:
            raise InputError(f"max_time must be positive, got {self.max_time}")
        check_least(0, gradient_clip_val=self.gradient_clip_val)
        counts = ("val_check_interval", "accumulate_grad_batches", "devices")
        check_least(1, **{name: getattr(self, name) for name in counts})
        if others := [name for name in self.logger.split(",") if name not in LOGGERS]:
            raise InputError(f"logger {shown(others[0])}: expected some of {', '.join(LOGGERS)}")

    @property
    def interval(self) -> int:
        """Steps between two validations."""
        fifth = max(1, self.max_steps // 5) if self.max_steps > 0 else _USUAL_INTERVAL
        return self.val_check_interval or min(fifth, _USUAL_INTERVAL)

    @property
    def max_seconds(self) -> float | None:
        """Limit of seconds of training, over all resumes."""
        return None if self.max_time is None else seconds_of("max_time", self.max_time)


@dataclass(frozen=True, kw_only=True)
class StartOptions:
    """The options of a command's beginning; InputError if they contradict each other.

    They are no options of the run: neither its config.yaml nor a checkpoint has them.
    """

    resume: str | None = None
    """Resume a run: its folder, a checkpoint, `auto` for the newest checkpoint of --run or of all runs,
    `auto_or_new` to begin --run if it has none. Elsewhere: resume_from_checkpoint."""
    ckpt_path: str | None = None
    """The checkpoint or folder of a run that `gpt validate` scores."""
    minutes: str | None = None
    """Train a model that suits the text and this time: minutes, or a time such as 90s or 8h, from the start
    of the command to its end. With --model.init_from, these weights are tuned. Elsewhere: time."""

    def __post_init__(self) -> None:
        if self.resume is not None and self.ckpt_path is not None:
            raise InputError("--resume and --ckpt_path name a checkpoint: give only one of them")


@dataclass(frozen=True, kw_only=True)
class Options:
    """All options of a run; InputError for a value out of its range."""

    run: str = "run"
    """Name of the folder under runs/ to write to; runs/NAME-2 if it exists.
    Elsewhere: out_dir, output_dir, default_root_dir."""
    seed_everything: int = 1337
    """Random seed of the initial weights, dropout and the order of the text. Rare. Elsewhere: seed."""
    checkpoint_every: int = 500
    """Steps between two checkpoints; one is also saved every minute, or every hundredth of the
    steps if that takes longer.
    Elsewhere: save_steps."""
    keep_checkpoints: int = 2
    """Newest checkpoints to keep. Rare. Elsewhere: save_total_limit."""
    log_every: int = 20
    """Steps between two rows of metrics.csv.
    Elsewhere: log_interval, logging_steps, log_every_n_steps, barebones."""
    snapshot_megabytes: int = 100
    """Maximum disk space in MB for snapshots, which gpt serve shows; 0 for none. Rare."""
    early_stopping: int | None = None
    """Stop after this many validations in a row without a lower val_loss."""
    temperature_scaling: bool = False
    """Divide a checkpoint's logits, wherever it is used, by the temperature that best fits held-out text."""
    model: ModelOptions = ModelOptions()
    data: DataOptions = DataOptions()
    trainer: TrainerOptions = TrainerOptions()

    def __post_init__(self) -> None:
        folder_of(self.run)
        counts = ("checkpoint_every", "keep_checkpoints", "log_every", "early_stopping")
        check_least(1, **{name: getattr(self, name) for name in counts})
        check_least(0, snapshot_megabytes=self.snapshot_megabytes, seed_everything=self.seed_everything)
        if self.seed_everything >= 1 << 32:
            raise InputError(f"seed_everything must be below {1 << 32}, got {self.seed_everything}")


class Option(NamedTuple):
    """One option: its type, its default, and its field's docstring."""

    kind: object
    default: object
    text: str


def all_options(kind: type, prefix: str = "") -> Iterator[tuple[str, Option]]:
    """Yield each option with its dotted name, in the order of the help."""
    hints = get_type_hints(kind)
    texts = {param.arg_name: param.description or "" for param in parse_from_object(kind).params}
    for field in fields(kind):
        name = f"{prefix}{field.name}"
        hint = hints[field.name]
        if is_dataclass(hint):
            yield from all_options(hint, f"{name}.")  # type: ignore[arg-type]
        else:
            yield name, Option(hint, field.default, " ".join(texts.get(field.name, "").split()))


START_OPTIONS = dict(all_options(StartOptions))
OPTIONS = {**START_OPTIONS, **dict(all_options(Options))}
LIMITS = ("trainer.max_steps", "trainer.max_epochs", "trainer.max_time")
"""The options that limit a run's length."""
