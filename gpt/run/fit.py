"""Build all parts of a run from its options, then train or validate."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.utilities.exceptions import SIGTERMException

from gpt.cores import cores
from gpt.data.module import TokenData, divide_update
from gpt.errors import InputError
from gpt.files import write_json
from gpt.pictures.runs import loss_curve
from gpt.plain import as_dict
from gpt.progress import counted, labelled, report
from gpt.run.distributed import data_parallel
from gpt.run.lightning_private import silence_warnings
from gpt.run.loop import Loop
from gpt.run.options import Options
from gpt.run.origin import Origin
from gpt.run.signals import Stopped
from gpt.run.summary import Figures, Summary, best_bits_per_byte, for_people
from gpt.run.temperature import divide_logits
from gpt.threads import sharing_cores
from gpt.training.device import choose_precision, keep_freed_memory
from gpt.training.module import LanguageModel
from gpt.weights.adapters import base_folder
from gpt.weights.checkpoint import parts_of


def prepare_process() -> None:
    """Apply the settings that concern the whole process."""
    silence_warnings()
    keep_freed_memory()
    if torch.cuda.is_available():  # TF32: several times faster, with 10 bits of mantissa
        torch.set_float32_matmul_precision("high")


def fit(origin: Origin) -> None:
    """Train. A run that a signal ended exits with the status that a shell gives for this signal."""
    training = assemble(origin)
    if origin.is_timed_tuning:
        as_they_are = new_trainer(training.options, training.data, [])
        with ended_by_signals():
            scored = as_they_are.validate(training.module, datamodule=training.data, verbose=False)
        for metrics in scored:
            report(f"the weights as they are: {metrics['val_bits_per_byte']:.4g} bits per byte")
    try:
        with ended_by_signals(), sharing_cores():
            training.fit()
    except Stopped as stopped:
        line, status = stopped.args
        report(line)
        if status:
            raise SystemExit(status) from None
        return
    if training.trainer.is_global_zero:
        summarize(training)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """End at a signal as other programs do. Lightning's own answers are other exit statuses.

    From the first step on `gpt/run/signals.py` answers instead.
    """
    try:
        yield
    except SIGTERMException:
        raise SystemExit(128 + signal.SIGTERM) from None
    except SystemExit:  # Lightning's answer to Ctrl-C
        raise KeyboardInterrupt from None


@dataclass(frozen=True)
class Training:
    """All parts of a run."""

    options: Options
    module: LanguageModel
    data: TokenData
    loop: Loop
    trainer: Trainer

    def fit(self) -> None:
        """Train until the run ends."""
        self.trainer.fit(self.module, datamodule=self.data)


def assemble(origin: Origin) -> Training:
    """Build all parts of a run and prepare its text, so that errors appear before its folder is made."""
    options, module, data = build(origin)
    if options.early_stopping and not data.prepared.counts["val"].tokens:
        if not origin.chose_early_stopping:
            raise InputError("early_stopping needs held-out text: give a --data.val_fraction above 0")
        options = replace(options, early_stopping=None)
    loop = Loop(options, module, data, origin)
    trainer = new_trainer(options, data, [loop], batches_per_update(options))
    return Training(options, module, data, loop, trainer)


def build(origin: Origin) -> tuple[Options, LanguageModel, TokenData]:
    """Return the completed options, the model and the data, whose text is prepared."""
    seed = origin.options.seed_everything
    model = origin.options.model
    trainer = origin.options.trainer
    data = TokenData(
        **as_dict(origin.options.data),
        vocab_size=model.config.vocab_size,
        context_length=model.config.context_length,
        seed=seed,
        tokenizer=origin.tokenizer,
        text=origin.text.take(),
    )
    if origin.tokenizer is None:
        model = replace(model, config=replace(model.config, vocab_size=data.tokenizer.n_vocab))
    precision = choose_precision(trainer.accelerator, trainer.precision)
    devices = trainer.processes
    if trainer.accelerator == "cpu" and devices > cores():
        report(f"{counted(devices, 'process')} on {counted(cores(), 'core')}: each waits for the others")
    trainer = replace(trainer, precision=precision, devices=devices)
    options = replace(origin.options, model=model, trainer=trainer)
    if saved := origin.checkpoint:  # its weights or adapters are loaded below
        model = replace(model, init_from=str(base_folder(saved.path)) if model.lora.rank else None)
    seed_everything(seed, verbose=False)
    module = LanguageModel(**as_dict(model), weights=origin.weights.take())
    if saved:  # start.py has checked that none is missing
        module.model.load_state_dict(saved.weights, strict=False)
    return options, module, data


def validate(origin: Origin) -> None:
    """Print a checkpoint's loss, perplexity and bits per byte on held-out text."""
    options, module, data = build(origin)
    if origin.checkpoint:
        divide_logits(module.model, origin.checkpoint.model.temperature)
    trainer = new_trainer(options, data, [])
    with ended_by_signals():
        metrics = trainer.validate(module, datamodule=data, verbose=False)
    if not metrics:
        raise InputError("no text is held out: give a --data.val_fraction above 0")
    if trainer.is_global_zero:
        print(json.dumps(metrics[0], indent=2))


def batches_per_update(options: Options) -> int:
    """Return how many batches of a process are accumulated; InputError if two options differ about it."""
    given = options.trainer.accumulate_grad_batches
    if options.data.tokens_per_update is None:
        return given
    processes = (options.trainer.devices or 1) * _machines()
    _, batches = divide_update(options.data, options.model.config.context_length, processes)
    if given not in (1, batches):
        raise InputError("tokens_per_update decides accumulate_grad_batches: give only one of them")
    return batches


def _machines() -> int:
    return int(os.environ.get("GROUP_WORLD_SIZE", "1"))  # set by torchrun


def new_trainer(
    options: Options, data: TokenData, callbacks: list[Callback], accumulated: int = 1
) -> Trainer:
    """Build a Trainer that only computes; the callbacks count, record and save."""
    plain = options.trainer
    # Torchrun may start a single process, which then trains as several do.
    from_torchrun = TorchElasticEnvironment.detect()
    launcher = TorchElasticEnvironment if from_torchrun else LightningEnvironment
    devices = plain.devices or 1
    try:
        return Trainer(
            accelerator=plain.accelerator,
            devices=devices,
            num_nodes=_machines(),
            strategy=data_parallel() if from_torchrun or devices > 1 else "auto",
            precision=plain.precision,
            accumulate_grad_batches=accumulated,
            gradient_clip_val=plain.gradient_clip_val,
            deterministic=plain.deterministic,
            callbacks=callbacks,
            plugins=[launcher()],
            max_epochs=-1,  # no limit: `Loop` ends training
            val_check_interval=1,  # `Loop` decides when to validate
            check_val_every_n_epoch=None,
            limit_val_batches=1.0 if data.prepared.counts["val"].tokens else 0.0,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,  # the data loader shards by rank itself
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            logger=False,
            log_every_n_steps=0,  # `Record` writes what is logged, at less cost than `self.log` in each step
            default_root_dir=os.devnull,  # Lightning would look here for checkpoints of SLURM jobs
        )
    except (MisconfigurationException, ValueError, RuntimeError) as error:
        raise InputError(f"the options cannot be used: {error}") from error


def planned_and_reached(training: Training, summary: Summary) -> tuple[Figures, Figures]:
    """Return what a planned run was given, and what it has reached with its best checkpoint."""
    run = training.loop.run
    origin = training.loop.origin
    planned: Figures = {
        "seconds": 60 * (origin.minutes or 0.0),
        "steps": training.options.trainer.max_steps,
    }
    seconds = time.perf_counter() - origin.began
    reached: Figures = {"seconds": seconds, "steps": run.step, "bits_per_byte": best_bits_per_byte(summary)}
    return planned, reached


def write_steps_made(training: Training) -> None:
    """Write the steps that a planned run has made into `config.yaml`, so that it repeats the run."""
    loop = training.loop
    trainer = replace(training.options.trainer, max_steps=loop.run.step)
    loop.run.options = asdict(replace(training.options, trainer=trainer))
    assert loop.store is not None  # this is the first process
    loop.store.write_config(loop.run)


def summarize(training: Training) -> None:
    """Write summary.json, then print how the run ended and what to do next."""
    options = training.options
    loop = training.loop
    folder = loop.folder
    assert loop.store is not None  # this is the first process
    report(f"ended after step {loop.run.step}: {loop.limits.why()}", prefix="")
    loss_curve(folder / "metrics.csv", folder / "loss.png")
    trainer = training.trainer
    summary = loop.record.summary(
        trainer.strategy.root_device, str(trainer.precision), training.module.model.num_parameters()
    )
    if options.temperature_scaling and summary["best_loss"] is not None:
        temperature = parts_of(loop.store.checkpoints.best)[0].temperature
        if temperature > 1:
            what = f"the best checkpoint's logits are divided by {temperature:.2f} wherever it is used"
            report(f"temperature scaling: {what}", prefix="")
    if loop.origin.plan:
        summary["planned"], summary["reached"] = planned_and_reached(training, summary)
    if loop.run.planned_seconds is not None:
        write_steps_made(training)
    write_json(folder / "summary.json", summary)
    is_chat = training.data.prepared.template is not None
    print("\n".join(labelled(for_people(summary, str(folder), is_chat), sys.stdout)))
