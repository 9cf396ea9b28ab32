"""`gpt fit` and `gpt validate`: LightningCLI with this project's defaults."""

import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from typing import Any

import yaml
from jsonargparse import set_parsing_settings
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.strategies import StrategyRegistry

from gpt import STARTED
from gpt.config import GPTConfig
from gpt.data.module import TokenData
from gpt.errors import InputError
from gpt.plan.plan import END_SECONDS
from gpt.run.adapters import AdaptersAlone
from gpt.run.arguments import Arguments, complete
from gpt.run.ends import Ends, StopEarly
from gpt.run.folder import RunFolder, folder_of_checkpoint, folder_to_restart
from gpt.run.lightning_private import silence_warnings
from gpt.run.micro_batch import FitMicroBatch, is_out_of_memory
from gpt.run.profiling import profiler
from gpt.run.record import Meter, MetricsCSV, Samples, TensorBoard, write_summary
from gpt.run.resume import AUTO_OR_NEW, Resume
from gpt.run.save import AtomicCheckpointIO, Checkpoints
from gpt.run.saved_options import OPTIONS, changes
from gpt.run.sharing import ShareCores
from gpt.run.signals import Stopped, StopRequest
from gpt.run.snapshots import Snapshots
from gpt.run.trainer_options import check_trainer_options
from gpt.run.vocabulary import choose_vocabulary
from gpt.training.device import allow_tf32, default_precision, keep_freed_memory
from gpt.training.module import LanguageModel
from gpt.training.output import MayEnd, report
from gpt.training.shard import ShardedStrategy
from gpt.weights.checkpoint import RUNS, check_shape

# What Lightning, jsonargparse and the loggers raise for options that they cannot use.
_REFUSALS = (MisconfigurationException, ImportError, TypeError, ValueError, RuntimeError)
_DEFAULTS = {
    "trainer.max_epochs": -1,
    "trainer.use_distributed_sampler": False,  # the loader shards by rank itself
    "trainer.check_val_every_n_epoch": None,  # val_check_interval counts batches, over epochs
    "trainer.num_sanity_val_steps": 0,
    "trainer.enable_model_summary": False,
    "trainer.gradient_clip_val": 1.0,
}


class TrainingCLI(LightningCLI):
    """LightningCLI over `LanguageModel` and `TokenData`; each run has a folder of its own."""

    def __init__(self, arguments: Arguments) -> None:
        self.given, self.found = arguments, arguments.found
        super().__init__(
            LanguageModel,
            TokenData,
            save_config_callback=None,  # RunFolder writes config.yaml
            seed_everything_default=1337,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            parser_kwargs={
                "prog": f"gpt {arguments.command}",
                "exit_on_error": False,
                "allow_abbrev": False,
                "default_config_files": list(arguments.defaults),
            },
            args=arguments.args,
            run=False,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        group = parser.add_argument_group("a run: its folder, what it resumes, saves and logs, when it stops")
        for name, (kind, default, text) in OPTIONS.items():
            how: dict[str, Any] = {"action": "store_true"} if default is False else {"type": kind}
            group.add_argument(f"--{name}", default=default, help=text, **how)
        parser.link_arguments("model.config.vocab_size", "data.vocab_size")
        parser.link_arguments("model.config.context_length", "data.context_length")
        parser.link_arguments("seed_everything", "data.seed", compute_fn=int)
        parser.set_defaults(_DEFAULTS)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        super().parse_arguments(parser, args)
        seed = self.config.seed_everything
        if not 0 <= int(seed) < 1 << 32:
            raise InputError(f"--seed_everything must be from 0 to {2**32 - 1}, got {seed}")

    def before_instantiate_classes(self) -> None:
        options, found, trainer = self.config, self.found, self.config.trainer
        check_trainer_options(trainer.as_dict())
        options.data.seed = int(options.seed_everything)  # `true` has become a number since it was linked
        lines = []
        if found:
            now = yaml.safe_load(self.parser.dump(options, skip_unset=False))
            lines += [f"resuming {found.path}, after step {found.step}"]
            lines += [f"skipped {path}, which is broken" for path in found.skipped]
            lines += [f"changed {change}" for change in changes(self.given.saved, now)]
        self.inherited = choose_vocabulary(options)
        if trainer.precision is None:
            trainer.precision = default_precision(trainer.accelerator)
        interval, batches = trainer.val_check_interval, trainer.accumulate_grad_batches
        if isinstance(interval, int) and interval % batches:
            trainer.val_check_interval = whole = interval + batches - interval % batches
            lines.append(f"validation every {whole} batches, not {interval}: after whole updates")
        name = "run" if options.run is None else str(options.run)
        self.lasting = options.clone()  # without what this start alone is asked for
        vars(self.lasting).update(run=name, resume=None, ckpt_path=None, minutes=None)
        if options.ckpt_path:
            config = GPTConfig.from_dict(options.model.config.as_dict())
            base = check_shape(options.ckpt_path, config, options.model.lora.rank)
            options.model.init_from = str(base) if base else None
        report(*lines)
        folder = folder_to_restart(name) if options.resume == AUTO_OR_NEW else None
        if found:
            folder = folder_of_checkpoint(found.path)
        self.folder = RunFolder(name, folder, self.parser.dump(self.lasting, skip_unset=False))
        trainer.default_root_dir = str(folder or RUNS)

    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except InputError:
            raise
        except (*_REFUSALS, MemoryError) as error:
            if is_out_of_memory(error):
                raise InputError("the model does not fit into memory: make it smaller") from None
            raise InputError(f"the options cannot be used: {error}") from error
        self.inherited.use(self.datamodule)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        options = self.config
        if self.given.command != "fit":
            return super().instantiate_trainer(logger=False, callbacks=[], enable_progress_bar=False)
        folder, stop, plain = self.folder, StopRequest(), options.trainer
        metrics, show = MetricsCSV(folder, "metrics.csv"), plain.enable_progress_bar is not False
        self.meter = Meter(options.log_every, metrics, show)
        done = self.found.step if self.found else 0
        self.ends = self._ends(done)
        self.stop_early = StopEarly(options.early_stopping) if options.early_stopping is not None else None
        if self.stop_early and plain.limit_val_batches == 0:
            raise InputError("early_stopping needs validation: leave out --trainer.limit_val_batches 0")
        callbacks: list[Callback] = [
            ShareCores(),
            self.ends,
            folder,
            FitMicroBatch(partial(self._save_option, "data.batch_size")),
            *self._several("callbacks"),
            Resume(options.seed_everything, self.meter),
            stop,
            self.meter,
            *([AdaptersAlone(folder)] if options.model.lora.rank else []),
            *([TensorBoard(folder, done or None)] if self.config_init.trainer.logger is not False else []),
            Samples(folder, show),
            *([self.stop_early] if self.stop_early else []),
            *([profiler(folder)] if options.profile else []),
            Snapshots(folder, options.snapshot_megabytes),
            Checkpoints(folder, options.checkpoint_every, options.keep_checkpoints, stop),
        ]
        loggers = [metrics, *(item for item in self._several("logger") if isinstance(item, Logger))]
        plugins = [*self._several("plugins"), AtomicCheckpointIO(self.found.path if self.found else None)]
        # `Ends` sets the true end, and `Meter` shows the progress.
        own = {"max_steps": -1, "max_epochs": -1, "max_time": None, "enable_progress_bar": False}
        return super().instantiate_trainer(callbacks=callbacks, logger=loggers, plugins=plugins, **own)

    def _several(self, name: str) -> list[Any]:
        """A Trainer option that may be one thing, a list or nothing."""
        value = self.config_init.trainer[name]
        return list(value) if isinstance(value, list) else [value] if value is not None else []

    def _ends(self, done: int) -> Ends:
        """What ends the run, keeps a planned one on time, and a resumed or repeated one equal to it."""
        plan, trainer, changes = self.given.plan, self.config.trainer, str(self.config.planned_steps or "")
        deadline, validation = None, 0.0
        if plan:
            changes, validation = f"0:{plan.steps}", plan.validation
            deadline = STARTED + 60 * plan.minutes - END_SECONDS
        elif changes.rpartition(":")[2] != str(trainer.max_steps):
            changes = ""  # not planned, or extended by hand
        extends = plan is None or plan.takes_all_of_it
        return Ends(trainer, done, self.meter, changes, deadline, validation, self._save_steps, extends)

    def _save_steps(self, changes: str) -> None:
        self.lasting.trainer.max_steps = int(changes.rpartition(":")[2])
        self._save_option("planned_steps", changes)

    def _save_option(self, name: str, value: Any) -> None:
        """Write an option that the run has found out into config.yaml and the checkpoints."""
        self.lasting[name] = value
        self.folder.config = self.parser.dump(self.lasting, skip_unset=False)
        if self.trainer.is_global_zero:
            self.folder.write_config()

    def run(self) -> None:
        """Train or validate."""
        if self.given.command == "fit":
            self.fit()
            return
        self.trainer.validate(self.model, datamodule=self.datamodule, ckpt_path=self.config.ckpt_path)
        metrics = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        if not metrics:
            raise InputError("the run had no validation: give --trainer.limit_val_batches 1.0")
        if self.trainer.is_global_zero:
            print(json.dumps(metrics, indent=2))

    def fit(self) -> None:
        """Train; a run that a signal ended exits with the status that the signal has in a shell."""
        self.datamodule.prepare_data()  # find errors in the data before a folder is made for the run
        self.datamodule.setup("fit")
        self.datamodule.train_dataloader()
        self.inherited.warn(self.datamodule)
        try:
            self.trainer.fit(self.model, datamodule=self.datamodule, ckpt_path=self.config.ckpt_path)
        except Stopped as stopped:
            line, status = stopped.args
            report(line)
            if status:
                raise SystemExit(status) from None
            return
        except MisconfigurationException as error:
            raise InputError(f"the options cannot be used: {error}") from error
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            what = "give a smaller --data.batch_size, or --data.tokens_per_update, which finds one that fits"
            raise InputError(f"a batch does not fit into memory: {what}") from error
        except SystemExit as leaving:  # Lightning's answer to a Ctrl-C before the first step
            interrupted = isinstance(leaving.__context__, KeyboardInterrupt)
            raise (KeyboardInterrupt if interrupted else leaving) from None
        finally:
            self.folder.release()
        if self.trainer.is_global_zero:
            self.summarize()

    def summarize(self) -> None:
        """Print how it ended and what to do next."""
        reason = (self.stop_early.reason if self.stop_early else None) or self.ends.reason
        report(f"ended after step {self.trainer.global_step}: {reason}", prefix="")
        folder, plan = self.folder / "", self.given.plan
        summary = write_summary(folder, self.trainer, self.meter, plan)
        print(json.dumps(summary, indent=2))
        if plan:
            what = "{}: {seconds:.1f} s, {tokens:,} tokens, {bits_per_byte:.4} bits per byte"
            report(", ".join(what.format(n, **summary[n]) for n in ("planned", "reached")), prefix="")
        print(f"{folder}/ holds the checkpoints, metrics.csv, loss.png and summary.json")
        what = "--interactive" if self.datamodule.prepared.template else "--prompt 'The '"
        print(f"next: gpt generate --checkpoint {folder} {what}")


def main(args: list[str], cli: type[TrainingCLI] = TrainingCLI) -> TrainingCLI:
    """Run `fit ...` or `validate ...`; what cannot be used is an InputError."""
    silence_warnings()
    keep_freed_memory()
    allow_tf32()
    set_parsing_settings(
        import_path_denylist=[],  # enforce jsonargparse's own list, instead of warning
        docstring_parse_attribute_docstrings=bool({"-h", "--help"} & {*args}),  # slow: read from source code
    )
    StrategyRegistry.register("fsdp2", ShardedStrategy, override=True)
    out: Any = MayEnd(sys.stdout)
    err: Any = MayEnd(sys.stderr)
    with redirect_stdout(out), redirect_stderr(err):
        built = cli(complete(args))
        built.run()
        return built
