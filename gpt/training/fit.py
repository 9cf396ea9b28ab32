"""`gpt fit` and `gpt validate`: LightningCLI with this project's defaults.

Options come from, each overriding the one before: the defaults in the code, the YAML files named with
`--config`, the command line. The result is written to the run's config.yaml.
"""

import importlib.util
import json
import logging
import sys
import warnings
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import yaml
from jsonargparse import set_parsing_settings
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities import rank_zero_only

from gpt.config import GPTConfig
from gpt.data.module import TokenData
from gpt.errors import InputError
from gpt.files import atomic_write, shipped
from gpt.training.memory import keep_freed_memory
from gpt.training.module import LanguageModel
from gpt.training.profiling import Profile
from gpt.training.progress import RunProgress
from gpt.training.record import Meter, MetricsCSV
from gpt.training.resume import AUTO_OR_NEW, Found, Resume, changes, find, run_folder
from gpt.training.run import Samples, ValidateAtEnd, draw_loss_curve, folder_of, new_folder, write_summary
from gpt.training.save import AtomicCheckpointIO, Checkpoints
from gpt.training.saved_options import OLD_NAMES, as_argument, plain_options, with_new_names
from gpt.training.shard import ShardedStrategy
from gpt.training.signals import Stopped, StopRequest
from gpt.weights.load import config_to_start_from


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
    """LightningCLI over `LanguageModel` and `TokenData`, whose runs go into folders of their own.

    Args:
        found: the checkpoint to go on from.
        restart: begin anew in the run's own folder, should it be there already.
    """

    folder: Path

    def __init__(self, *args: Any, found: Found | None = None, restart: bool = False, **kwargs: Any) -> None:
        self.found, self.restart = found, restart
        super().__init__(*args, **kwargs)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add what belongs to a run, and tell the data what the model already knows."""
        parser.add_argument("--run", default="run", help="name of the folder under runs/ to write to")
        parser.add_argument(
            "--resume",
            default=None,
            help="go on with a run: its folder, a checkpoint, 'auto' for the newest checkpoint of --run or "
            "of all runs, 'auto_or_new' to begin --run where it has none",
        )
        parser.add_argument("--checkpoint_every", type=int, default=500, help="steps between two last.ckpt")
        parser.add_argument("--keep_checkpoints", type=int, default=2, help="newest checkpoints to keep")
        parser.add_argument("--log_every", type=int, default=20, help="steps between two rows of metrics.csv")
        parser.add_argument("--profile", action="store_true", help="trace some steps: profile.json and .txt")
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
        if self.found:
            self._announce(self.found)
        if options.model.init_from is not None:
            given = GPTConfig.from_dict(options.model.config.as_dict())
            shape = config_to_start_from(options.model.init_from, given)
            for name, value in shape.to_dict().items():
                options.model.config[name] = value
            options.data.vocab_size = shape.vocab_size
        name = options.get("run") or "run"
        self.folder = (run_folder(self.found.path) if self.found else None) or (
            folder_of(name) if self.restart else new_folder(name)
        )
        options.trainer.default_root_dir = str(self.folder)
        if options.trainer.precision is None:
            options.trainer.precision = (
                "bf16-mixed" if bfloat16_is_fast(options.trainer.accelerator) else "32-true"
            )

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """As LightningCLI, with a line about a file of options that is no text or contains itself."""
        try:
            super().parse_arguments(parser, args)
        except (UnicodeDecodeError, RecursionError) as error:
            raise InputError(f"a file given with --config cannot be read: {error}") from None

    def instantiate_classes(self) -> None:
        """As LightningCLI, with a line about a model that is too large."""
        try:
            super().instantiate_classes()
        except (MemoryError, RuntimeError) as error:
            if "alloc" not in str(error):
                raise
            raise InputError("the model does not fit into memory: make it smaller") from None

    def _announce(self, found: Found) -> None:
        """Say what the run goes on from, and which options are not those it had."""
        options = self.config[self.subcommand]
        told = [f"goes on from {found.path}, after step {found.step}"]
        told += [f"passed over {path}, which is broken" for path in found.passed_over]
        told += [f"changed {change}" for change in changes(found.options, self._dump(options))]
        if 0 < options.trainer.max_steps <= found.step:
            told.append(f"all {found.step} steps are done: ask for more with --trainer.max_steps")
        tell(*told)

    def _dump(self, options: Any) -> str:
        return self._parser(self.subcommand).dump(options, skip_unset=False)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Add the run's loggers, callbacks and checkpoints to what the options ask for."""
        options = self.config[self.subcommand]
        if self.subcommand != "fit":
            self.save_config_callback = None
            return super().instantiate_trainer(logger=False, callbacks=[], enable_progress_bar=False)
        metrics, stop, samples = MetricsCSV(self.folder), StopRequest(), Samples(self.folder)
        self.meter = Meter(options.log_every, metrics)
        callbacks: list[Callback] = [
            Resume(self.folder, options.seed_everything, self.meter),
            stop,
            self.meter,
            ValidateAtEnd(),
            samples,
            RunProgress(self.meter, samples),
            Checkpoints(
                self.folder / "checkpoints",
                every=options.checkpoint_every,
                keep=options.keep_checkpoints,
                options=self._dump(options),
                stop=stop,
            ),
        ]
        if options.profile:
            callbacks.append(Profile(self.folder))
        chosen = self._get(self.config_init, "trainer").get("logger")  # a logger, several, false or nothing
        loggers: list[Logger] = [metrics]
        if chosen is not False and importlib.util.find_spec("tensorboard"):
            loggers.append(
                TensorBoardLogger(
                    self.folder,
                    name="tensorboard",
                    version="",
                    default_hp_metric=False,
                    purge_step=self.found.step if self.found else None,
                )
            )
        several = chosen if isinstance(chosen, list) else [chosen]
        loggers += [logger for logger in several if isinstance(logger, Logger)]
        self.save_config_kwargs = {"folder": self.folder}
        extra = [*(self._get(self.config_init, "trainer").get("callbacks") or []), *callbacks]
        files = AtomicCheckpointIO(checked=self.found.path if self.found else None)
        try:
            return super().instantiate_trainer(callbacks=extra, logger=loggers, plugins=[files])
        except (MisconfigurationException, TypeError, ValueError, RuntimeError) as error:
            raise InputError(f"the trainer's options cannot be used: {error}") from None

    def before_fit(self) -> None:
        """Find out what is wrong with the data before a folder is made for the run."""
        self.datamodule.prepare_data()
        self.datamodule.setup("fit")
        self.datamodule.train_dataloader()

    def fit(self, **kwargs: Any) -> None:
        """Train; a run that a signal ended leaves with the status that the signal has in a shell."""
        try:
            self.trainer.fit(**kwargs)
        except Stopped as stopped:
            tell(str(stopped))
            raise SystemExit(stopped.status) from None
        except SystemExit as leaving:  # Lightning's answer to a Ctrl-C before the first step
            interrupted = isinstance(leaving.__context__, KeyboardInterrupt)
            raise (KeyboardInterrupt if interrupted else leaving) from None

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


@rank_zero_only
def tell(*lines: str) -> None:
    """Say something, once for all processes."""
    for line in lines:
        print(f"gpt fit: {line}", file=sys.stderr)


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
    """Parse the options and do what they say; those of a checkpoint come before all others."""
    quiet()
    keep_freed_memory()
    set_parsing_settings(import_path_denylist=[])  # enforces jsonargparse's own list, which else only warns
    if "fsdp2" not in StrategyRegistry:
        StrategyRegistry.register("fsdp2", ShardedStrategy)
    args = rename_options(args)
    found, resume, checkpoint = None, option(args, "--resume"), option(args, "--ckpt_path")
    plain = with_plain_configs(args)
    run, args = named_run(args), plain
    if resume or checkpoint:
        found = find(resume or checkpoint or "", run) if args[0] == "fit" else find(checkpoint or "")
        if found:
            given = given_options(args)
            saved = plain_options(found.options, found.path, given, dropped=("model.init_from",))
            found = replace(found, options=yaml.safe_dump(saved))
            args = [args[0], "--config", as_argument(saved), *without(args[1:], "--resume", "--ckpt_path")]
            args += ["--ckpt_path", str(found.path)]
        else:
            args = without(args, "--resume", "--ckpt_path")
        found = found if args[0] == "fit" else None
    if not any(argument.split("=")[0] in ("-c", "--config", "-h", "--help") for argument in args):
        fine_tuning = option(args, "--model.init_from") is not None
        config = shipped("configs") / ("finetune.yaml" if fine_tuning else "quick.yaml")
        args = [args[0], "--config", str(config), *args[1:]]
    return cli(
        LanguageModel,
        TokenData,
        found=found,
        restart=resume == AUTO_OR_NEW,
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


def option(args: list[str], *names: str) -> str | None:
    """The last value given to an option, as `--name value` or `--name=value`."""
    values = [value for name, value in pairwise(args) if name in names]
    values += [name.partition("=")[2] for name in args if "=" in name and name.partition("=")[0] in names]
    return values[-1] if values else None


def without(args: list[str], *names: str) -> list[str]:
    """The arguments less some options and their values."""
    kept, skip = [], False
    for argument in args:
        if not skip and argument.partition("=")[0] not in names:
            kept.append(argument)
        skip = not skip and argument in names
    return kept


def rename_options(args: list[str]) -> list[str]:
    """The arguments, options that are given by an old name renamed, with a line on stderr for each."""
    renamed = []
    for argument in args:
        name, equals, value = argument.partition("=")
        if (new := OLD_NAMES.get(name.removeprefix("--"))) and name.startswith("--"):
            tell(f"{name} is now called --{new}")
            argument = f"--{new}{equals}{value}"
        renamed.append(argument)
    return renamed


def with_plain_configs(args: list[str]) -> list[str]:
    """The arguments, each config.yaml of a run's folder replaced by its options, which are read as data.

    A file of options with old names is replaced by the same options with new names.
    """
    names, given, plain = ("-c", "--config"), given_options(args), []
    for before, argument in pairwise(["", *args]):
        name, equals, value = argument.partition("=")
        glued = bool(equals) and name in names
        path = Path(value if glued else argument)
        options = None
        if (glued or before in names) and path.is_file():
            if (path.parent / "checkpoints").is_dir():
                options = plain_options(read_text(path), path, given)
            elif any(f"{old.rpartition('.')[2]}:" in read_text(path) for old in OLD_NAMES):
                options = with_new_names(yaml.safe_load(read_text(path)))
        if options is None:
            plain.append(argument)
        else:
            plain += ["--config", as_argument(options)] if glued else [as_argument(options)]
    return plain


def read_text(path: Path) -> str:
    """A file of options.

    Raises:
        InputError: it is no text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} cannot be read: {error}") from None


def given_options(args: list[str]) -> set[str]:
    """The names of the options on the command line."""
    return {argument.partition("=")[0].removeprefix("--") for argument in args if argument.startswith("--")}


def named_run(args: list[str]) -> str | None:
    """The run that --run or a file of options names."""
    run, config = option(args, "--run"), option(args, "-c", "--config")
    if run is None and config is not None and Path(config).is_file():
        try:
            values = yaml.safe_load(read_text(Path(config)))
        except yaml.YAMLError as error:
            raise InputError(f"--config {config} is not YAML: {error}") from None
        run = values.get("run") if isinstance(values, dict) else None
    return run


def quiet() -> None:
    """Silence Lightning's advertisements and the warnings that do not apply here."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    for message in (
        ".*treespec, LeafSpec.*",
        ".*does not have many workers.*",  # the loader reads a memory map: workers would only copy
        ".*LightningCLI's args parameter.*",
        ".*smaller than the logging interval.*",  # Lightning's own, unused here
        ".*sync_dist=True.*",  # the sums are reduced before they are logged
        ".*callbacks used to create the checkpoint need to be provided.*",
    ):
        warnings.filterwarnings("ignore", message)
