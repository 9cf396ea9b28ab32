"""`gpt fit` and `gpt validate`: LightningCLI with this project's defaults.

Options come from, each overriding the one before: the defaults in the code, the YAML files named with
`--config`, the command line. The result is written to the run's config.yaml.
"""

import importlib.util
import json
import logging
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.loggers.logger import Logger

from gpt.checkpoint import config_to_start_from
from gpt.checkpoint import read as read_checkpoint
from gpt.config import GPTConfig
from gpt.data.module import TokenData
from gpt.errors import InputError
from gpt.files import atomic_write
from gpt.training.checkpoint import AtomicCheckpointIO, LastCheckpoint, best_checkpoint
from gpt.training.module import LanguageModel
from gpt.training.progress import RunProgress
from gpt.training.run import (
    Meter,
    MetricsCSV,
    Samples,
    ValidateAtEnd,
    draw_loss_curve,
    new_folder,
    write_summary,
)


class SaveConfig(SaveConfigCallback):
    """Writes the resolved options beside the run, not where the first logger happens to write."""

    def __init__(self, *args: Any, folder: Path, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "save_to_log_dir": False})
        self.folder = folder

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write config.yaml, when a run begins."""
        if stage == "fit":
            with atomic_write(self.folder / "config.yaml") as file:
                file.write(self.parser.dump(self.config, skip_unset=False))


class TrainingCLI(LightningCLI):
    """LightningCLI over `LanguageModel` and `TokenData`, whose runs go into folders of their own."""

    folder: Path

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add what belongs to a run, and tell the data what the model already knows."""
        parser.add_argument("--run", default="run", help="name of the folder under runs/ to write to")
        parser.add_argument("--checkpoint_every", type=int, default=500, help="steps between two last.ckpt")
        parser.add_argument("--log_every", type=int, default=20, help="steps between two rows of metrics.csv")
        parser.link_arguments("model.config.vocab_size", "data.vocab_size")
        parser.link_arguments("model.config.context_length", "data.context_length")
        parser.link_arguments("seed_everything", "data.seed", compute_fn=int)
        parser.set_defaults(
            {
                "trainer.max_epochs": -1,
                "trainer.use_distributed_sampler": False,  # the loader shards by rank itself
                "trainer.check_val_every_n_epoch": None,  # val_check_interval counts steps, not epochs
                "trainer.num_sanity_val_steps": 0,
                "trainer.enable_model_summary": False,
                "trainer.gradient_clip_val": 1.0,
            }
        )

    def _parse_ckpt_path(self) -> None:
        """Not what LightningCLI does, which lets a checkpoint's options win over the command line's."""

    def before_instantiate_classes(self) -> None:
        """Choose the run's folder, the precision that pays off here, and the shape of given weights."""
        options = self.config[self.subcommand]
        if options.get("ckpt_path"):
            options.model.init_from = None  # the checkpoint has what became of those weights
        if options.model.init_from is not None:
            given = GPTConfig.from_dict(options.model.config.as_dict())
            shape = config_to_start_from(options.model.init_from, given)
            for name, value in shape.to_dict().items():
                options.model.config[name] = value
            options.data.vocab_size = shape.vocab_size
        self.folder = new_folder(options.get("run") or "run")
        options.trainer.default_root_dir = str(self.folder)
        if options.trainer.precision is None:
            options.trainer.precision = (
                "bf16-mixed" if bfloat16_is_fast(options.trainer.accelerator) else "32-true"
            )

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Add the run's loggers, callbacks and checkpoints to what the options ask for."""
        options = self.config[self.subcommand]
        if self.subcommand != "fit":
            self.save_config_callback = None
            return super().instantiate_trainer(logger=False, callbacks=[], enable_progress_bar=False)
        self.meter = Meter(options.log_every)
        samples = Samples(self.folder)
        callbacks: list[Callback] = [
            self.meter,
            ValidateAtEnd(),
            samples,
            RunProgress(self.meter, samples),
            best_checkpoint(self.folder / "checkpoints"),
            LastCheckpoint(self.folder / "checkpoints", options.checkpoint_every),
        ]
        chosen = self._get(self.config_init, "trainer").get("logger")  # a logger, several, false or nothing
        loggers: list[Logger] = [MetricsCSV(self.folder)]
        if chosen is not False and importlib.util.find_spec("tensorboard"):
            loggers.append(
                TensorBoardLogger(self.folder, name="tensorboard", version="", default_hp_metric=False)
            )
        several = chosen if isinstance(chosen, list) else [chosen]
        loggers += [logger for logger in several if isinstance(logger, Logger)]
        self.save_config_kwargs = {"folder": self.folder}
        extra = [*(self._get(self.config_init, "trainer").get("callbacks") or []), *callbacks]
        return super().instantiate_trainer(callbacks=extra, logger=loggers, plugins=[AtomicCheckpointIO()])

    def before_fit(self) -> None:
        """Find out what is wrong with the data before a folder is made for the run."""
        self.datamodule.prepare_data()
        self.datamodule.setup("fit")
        self.datamodule.train_dataloader()

    def after_fit(self) -> None:
        """Say how it ended and what to do next."""
        if not self.trainer.is_global_zero:
            return
        draw_loss_curve(self.folder)
        summary = write_summary(self.folder, self.trainer, self.model.model.num_parameters(), self.meter)
        print(json.dumps(summary, indent=2))
        print(f"{self.folder}/ holds the checkpoints, metrics.csv, loss.png and summary.json")
        print(f"next: gpt generate --checkpoint {self.folder} --prompt 'The '")

    def after_validate(self) -> None:
        """Print what validation found."""
        metrics = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        if self.trainer.is_global_zero:
            print(json.dumps(metrics, indent=2))


def bfloat16_is_fast(accelerator: str | Any) -> bool:
    """Whether matrix products in bfloat16 beat float32's on the device that `accelerator` will choose."""
    if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if accelerator in ("auto", "cpu"):
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return False


def main(args: list[str]) -> None:
    """Run LightningCLI on `fit ...` or `validate ...`.

    Raises:
        InputError: the options, the corpus or the checkpoint cannot be used.
    """
    start(TrainingCLI, args)


def start(cli: type[TrainingCLI], args: list[str]) -> TrainingCLI:
    """Parse the options and do what they say."""
    quiet()
    if not any(argument.split("=")[0] in ("-c", "--config", "-h", "--help") for argument in args):
        args = [args[0], "--config", str(default_config(args)), *args[1:]]
    return cli(
        LanguageModel,
        TokenData,
        save_config_callback=SaveConfig,
        seed_everything_default=1337,
        auto_configure_optimizers=False,
        load_from_checkpoint_support=False,
        parser_kwargs={
            "exit_on_error": False,
            **{name: {"exit_on_error": False} for name in ("fit", "validate")},
        },
        args=args,
    )


def default_config(args: list[str]) -> Path:
    """The options of the run whose checkpoint is named, else those of fine-tuning or of the quick run.

    Raises:
        InputError: the checkpoint is not one, or its run's config.yaml is gone.
    """
    named = [value for name, value in pairwise(args) if name == "--ckpt_path"]
    named += [argument.split("=", 1)[1] for argument in args if argument.startswith("--ckpt_path=")]
    if not named:
        fine_tuning = any(argument.startswith("--model.init_from") for argument in args)
        return shipped("configs") / ("finetune.yaml" if fine_tuning else "quick.yaml")
    read_checkpoint(named[-1])
    config = Path(named[-1]).parents[1] / "config.yaml"
    if not config.is_file():
        raise InputError(f"{config} is missing: name the options of that run with --config")
    return config


def shipped(folder: str) -> Path:
    """A folder at the top of the repository, which a wheel carries inside the package."""
    package = Path(__file__).parents[1]
    return next(path for path in (package.parent / folder, package / folder) if path.is_dir())


def quiet() -> None:
    """Silence Lightning's advertisements and the warnings that do not apply here."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    for message in (
        ".*treespec, LeafSpec.*",
        ".*does not have many workers.*",  # the loader reads a memory map: workers would only copy
        ".*LightningCLI's args parameter.*",
        ".*Checkpoint directory .* exists and is not empty.*",
    ):
        warnings.filterwarnings("ignore", message)
