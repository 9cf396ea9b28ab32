"""`gpt fit` and `gpt validate`: LightningCLI with this project's defaults."""

import importlib.util
import json
from typing import Any

from jsonargparse import set_parsing_settings
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, SaveConfigCallback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.strategies import StrategyRegistry

from gpt.config import GPTConfig
from gpt.data.module import TokenData
from gpt.data.vocabularies import Learned, find_vocabulary
from gpt.errors import InputError
from gpt.files import atomic_write
from gpt.tokenizer import Tokenizer
from gpt.training.arguments import Arguments, complete, report
from gpt.training.device import default_precision
from gpt.training.ends import ValidateAtEnd
from gpt.training.folder import folder_of, folder_of_checkpoint, new_folder
from gpt.training.lightning_private import CommandLine, silence_warnings
from gpt.training.memory import keep_freed_memory
from gpt.training.module import LanguageModel
from gpt.training.profiling import Profile
from gpt.training.progress import RunProgress
from gpt.training.record import Meter, MetricsCSV
from gpt.training.resume import Resume
from gpt.training.samples import Samples
from gpt.training.save import AtomicCheckpointIO, Checkpoints
from gpt.training.saved_options import changes
from gpt.training.shard import ShardedStrategy
from gpt.training.signals import Stopped, StopRequest
from gpt.training.summary import write_summary
from gpt.weights.checkpoint import read_model_part
from gpt.weights.load import read_to_start_from


class SaveConfig(SaveConfigCallback):
    """Writes the resolved options into the run's folder, not where the first logger writes."""

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write config.yaml when a run begins."""
        if stage == "fit":
            with atomic_write(f"{trainer.default_root_dir}/config.yaml") as file:
                file.write(self.parser.dump(self.config, skip_unset=False))


class TrainingCLI(CommandLine):
    """LightningCLI over `LanguageModel` and `TokenData`; each run has a folder of its own.

    Args:
        arguments: the command line, and what it resumes.
    """

    def __init__(self, arguments: Arguments) -> None:
        self.found, self.saved, self.restart = arguments.found, arguments.saved, arguments.restart
        self.tokenizer: Tokenizer | None = None  # of the weights to continue from, unless it is GPT-2's
        self.bytes_per_token: float | None = None  # of the text that those weights were trained on
        strict = {"exit_on_error": False, "allow_abbrev": False}
        super().__init__(
            LanguageModel,
            TokenData,
            save_config_callback=SaveConfig,
            save_config_kwargs={"save_to_log_dir": False},
            seed_everything_default=1337,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            parser_kwargs={**strict, "fit": strict, "validate": strict},
            args=arguments.args,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add a run's options, links between the model and the data, and this project's defaults."""
        parser.add_argument("--run", default="run", help="name of the folder under runs/ to write to")
        parser.add_argument(
            "--resume",
            default=None,
            help="resume a run: its folder, a checkpoint, 'auto' for the newest checkpoint of --run or of "
            "all runs, 'auto_or_new' to begin --run if it has none",
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
                "trainer.check_val_every_n_epoch": None,  # val_check_interval counts batches, over epochs
                "trainer.num_sanity_val_steps": 0,
                "trainer.enable_model_summary": False,
                "trainer.gradient_clip_val": 1.0,
            }
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse, and report a file of options that is not text or contains itself."""
        try:
            super().parse_arguments(parser, args)
        except (UnicodeDecodeError, RecursionError) as error:
            raise InputError(f"a file given with --config cannot be read: {error}") from None

    def before_instantiate_classes(self) -> None:
        """Choose the run's folder, the precision, and the shape of given weights."""
        options = self.config[self.subcommand]
        if options.get("ckpt_path"):
            options.model.init_from = None  # the checkpoint has newer weights
        if self.found:
            self._report_resume()
        if options.model.init_from is not None:
            if options.data.vocabulary is not None:
                raise InputError("--data.vocabulary: weights to start from keep their own, leave it out")
            given = GPTConfig.from_dict(options.model.config.as_dict())
            found = read_to_start_from(options.model.init_from, given)
            for name, value in found.config.to_dict().items():
                options.model.config[name] = value
            options.data.vocab_size = found.config.vocab_size
            self.tokenizer, self.bytes_per_token = found.own_tokenizer, found.bytes_per_token
        elif options.data.vocabulary is not None:
            wanted = find_vocabulary(options.data.vocabulary, options.data.vocab_size)
            size = wanted.size if isinstance(wanted, Learned) else wanted.n_vocab
            size = size or TokenData(**options.data.as_dict()).tokenizer.n_vocab
            options.model.config.vocab_size = options.data.vocab_size = size
        if options.get("ckpt_path") and (saved := read_model_part(options.ckpt_path).get("tokenizer")):
            self.tokenizer = Tokenizer.from_dict(saved)
        name = options.get("run") or "run"
        self.folder = (folder_of_checkpoint(self.found.path) if self.found else None) or (
            folder_of(name) if self.restart else new_folder(name)
        )
        options.trainer.default_root_dir = str(self.folder)
        if options.trainer.precision is None:
            options.trainer.precision = default_precision(options.trainer.accelerator)

    def _report_resume(self) -> None:
        """Print which checkpoint the run resumes, and which options changed."""
        assert self.found is not None
        options = self.config[self.subcommand]
        now = options.clone().as_dict()
        lines = [f"resuming {self.found.path}, after step {self.found.step}"]
        lines += [f"skipped {path}, which is broken" for path in self.found.skipped]
        lines += [f"changed {change}" for change in changes(self.saved or {}, now)]
        if 0 < options.trainer.max_steps <= self.found.step:
            lines.append(f"all {self.found.step} steps are done: ask for more with --trainer.max_steps")
        report(*lines)

    def instantiate_classes(self) -> None:
        """Build everything, and report a model that is too large."""
        try:
            super().instantiate_classes()
        except (MemoryError, RuntimeError) as error:
            if "alloc" not in str(error):
                raise
            raise InputError("the model does not fit into memory: make it smaller") from None
        data = self.datamodule
        if self.tokenizer and not (isinstance(data.vocabulary, Learned) and data.tokenizer == self.tokenizer):
            data.use(self.tokenizer)  # weights keep their vocabulary, whatever the text

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Add the run's loggers, callbacks and checkpoints to those that the options name."""
        options = self.config[self.subcommand]
        if self.subcommand != "fit":
            self.save_config_callback = None
            return super().instantiate_trainer(logger=False, callbacks=[], enable_progress_bar=False)
        metrics, stop, samples = MetricsCSV(self.folder), StopRequest(), Samples(self.folder)
        self.meter = Meter(options.log_every, metrics)
        callbacks: list[Callback] = [
            *(self.trainer_option("callbacks") or []),
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
                options=self.options_parser.dump(options, skip_unset=False),
                stop=stop,
            ),
            *([Profile(self.folder)] if options.profile else []),
        ]
        files = AtomicCheckpointIO(checked=self.found.path if self.found else None)
        try:
            return super().instantiate_trainer(
                callbacks=callbacks, logger=[metrics, *self._loggers()], plugins=[files]
            )
        except (MisconfigurationException, TypeError, ValueError, RuntimeError) as error:
            raise InputError(f"the trainer's options cannot be used: {error}") from None

    def _loggers(self) -> list[Logger]:
        """TensorBoard's where it is installed and not switched off, and those that the options name."""
        chosen = self.trainer_option("logger")  # a logger, several, false or None
        loggers: list[Logger] = []
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
        return loggers + [logger for logger in several if isinstance(logger, Logger)]

    def before_fit(self) -> None:
        """Find errors in the data before a folder is made for the run."""
        self.datamodule.prepare_data()
        self.datamodule.setup("fit")
        self.datamodule.train_dataloader()
        before, now = self.bytes_per_token, self.datamodule.bytes_per_token
        if isinstance(before, float) and now < 0.6 * before:
            report(
                f"the model's vocabulary does not suit this text: {now:.2f} bytes a token, "
                f"{before:.2f} on the text it was trained on"
            )

    def fit(self, **kwargs: Any) -> None:
        """Train; a run that a signal ended exits with the status that the signal has in a shell."""
        try:
            self.trainer.fit(**kwargs)
        except Stopped as stopped:
            report(str(stopped))
            raise SystemExit(stopped.status) from None
        except SystemExit as leaving:  # Lightning's answer to a Ctrl-C before the first step
            interrupted = isinstance(leaving.__context__, KeyboardInterrupt)
            raise (KeyboardInterrupt if interrupted else leaving) from None

    def after_fit(self) -> None:
        """Print how it ended and what to do next."""
        if not self.trainer.is_global_zero:
            return
        summary = write_summary(self.folder, self.trainer, self.model.model.num_parameters(), self.meter)
        print(json.dumps(summary, indent=2))
        print(f"{self.folder}/ holds the checkpoints, metrics.csv, loss.png and summary.json")
        print(f"next: gpt generate --checkpoint {self.folder} --prompt 'The '")

    def after_validate(self) -> None:
        """Print the validation metrics."""
        metrics = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        if self.trainer.is_global_zero:
            print(json.dumps(metrics, indent=2))


def main(args: list[str]) -> None:
    """Run `fit ...` or `validate ...`.

    Raises:
        InputError: the options, the corpus or the checkpoint cannot be used.
    """
    start(TrainingCLI, args)


def start(cli: type[TrainingCLI], args: list[str]) -> TrainingCLI:
    """Parse the options and do what they say."""
    silence_warnings()
    keep_freed_memory()
    set_parsing_settings(import_path_denylist=[])  # enforce jsonargparse's own list, instead of warning
    if "fsdp2" not in StrategyRegistry:
        StrategyRegistry.register("fsdp2", ShardedStrategy)
    return cli(complete(args))
