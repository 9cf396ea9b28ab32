"""`gpt fit` and `gpt validate`: from a command line to a Trainer that runs."""

import json
import os
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, replace
from typing import Any

import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer

from gpt import STARTED
from gpt.data.module import TokenData
from gpt.errors import InputError
from gpt.plan.plan import Plan
from gpt.run.lightning_private import cluster, silence_warnings
from gpt.run.loop import Loop
from gpt.run.options import Options
from gpt.run.record import write_summary
from gpt.run.shape import build, is_out_of_memory
from gpt.run.signals import Stopped
from gpt.run.start import Start, start
from gpt.threads import sharing_cores
from gpt.training.device import allow_tf32, keep_freed_memory
from gpt.training.module import LanguageModel
from gpt.training.output import MayEnd, report

# What Lightning raises for options that it cannot use.
_REFUSALS = (MisconfigurationException, ImportError, TypeError, ValueError, RuntimeError)


def main(arguments: list[str]) -> None:
    """Run `fit ...` or `validate ...`; what cannot be used is an InputError."""
    command, *rest = arguments
    out: Any = MayEnd(sys.stdout)
    err: Any = MayEnd(sys.stderr)
    with redirect_stdout(out), redirect_stderr(err):
        begun = start(command, rest)
        if begun.print_config:
            print(yaml.safe_dump(asdict(begun.options), sort_keys=False, allow_unicode=True), end="")
            return
        prepare_process()
        run = {"fit": fit, "validate": validate}[command]
        run(begun)


def prepare_process() -> None:
    """Settings of the whole process."""
    silence_warnings()
    keep_freed_memory()
    allow_tf32()


def fit(begun: Start) -> None:
    """Train; a run that a signal ended exits with the status that the signal has in a shell."""
    report(*begun.notes)
    trainer, loop, module, data = assemble(begun)
    if begun.minutes and begun.options.model.init_from and loop.options.trainer.limit_val_batches:
        as_they_are = new_trainer(loop.options, callbacks=[])
        found = as_they_are.validate(module, datamodule=data, verbose=False)[0]
        report(f"the weights as they are: {found['val_bits_per_byte']:.4g} bits per byte")
    try:
        with sharing_cores():
            trainer.fit(module, datamodule=data)
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
        what = "give a smaller --data.batch_size; with --data.tokens_per_update the updates stay the same"
        raise InputError(f"a batch does not fit into memory: {what}") from error
    except SystemExit as leaving:  # Lightning's answer to a Ctrl-C before the first step
        interrupted = isinstance(leaving.__context__, KeyboardInterrupt)
        raise (KeyboardInterrupt if interrupted else leaving) from None
    finally:
        loop.close()
    if trainer.is_global_zero:
        summarize(begun.plan, trainer, loop, data)


def assemble(begun: Start) -> tuple[Trainer, Loop, LanguageModel, TokenData]:
    """All parts of a run, its text prepared: what is wrong with it is found before there is a folder."""
    options, module, data = build(begun.options, begun.checkpoint)
    loop = Loop(options, module, data, begun)
    trainer = new_trainer(options, callbacks=[loop])
    data.setup("fit")
    data.train_dataloader()
    return trainer, loop, module, data


def validate(begun: Start) -> None:
    """Print the figures of a checkpoint on the text that is held out."""
    options, module, data = build(begun.options, begun.checkpoint)
    plain = replace(options.trainer, limit_val_batches=1.0)
    trainer = new_trainer(replace(options, trainer=plain), callbacks=[])
    trainer.validate(module, datamodule=data, verbose=False)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    if trainer.is_global_zero:
        print(json.dumps(metrics, indent=2))


def new_trainer(options: Options, callbacks: list[Any]) -> Trainer:
    """A Trainer that computes: what a run counts, records and saves is the callbacks'."""
    plain = options.trainer
    if plain.num_nodes > 1 and not {"MASTER_ADDR", "SLURM_JOB_ID"} & {*os.environ}:  # it would wait forever
        how = (
            "start its processes with torchrun or SLURM (docs/hardware.md), or set MASTER_ADDR and NODE_RANK"
        )
        raise InputError(f"--trainer.num_nodes {plain.num_nodes}: {how}")
    try:
        return Trainer(
            accelerator=plain.accelerator,
            strategy=plain.strategy,
            devices=plain.devices or 1,
            num_nodes=plain.num_nodes,
            precision=plain.precision,
            accumulate_grad_batches=plain.accumulate_grad_batches,
            gradient_clip_val=plain.gradient_clip_val,
            deterministic=plain.deterministic,
            callbacks=callbacks,
            plugins=cluster(),
            max_steps=-1,  # `Loop` ends training
            max_epochs=-1,
            val_check_interval=1,  # and says when to validate
            check_val_every_n_epoch=None,
            limit_val_batches=plain.limit_val_batches,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,  # the loader shards by rank itself
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_autolog_hparams=False,
            logger=False,
            default_root_dir=os.devnull,  # where Lightning would look for checkpoints of SLURM
        )
    except _REFUSALS as error:
        raise InputError(f"the options cannot be used: {error}") from error


def summarize(plan: Plan | None, trainer: Trainer, loop: Loop, data: TokenData) -> None:
    """Print how it ended and what to do next."""
    report(f"ended after step {loop.run.step}: {loop.limits.why()}", prefix="")
    folder, seconds = loop.folder, time.perf_counter() - STARTED
    summary = write_summary(folder, loop.run, trainer, loop.tokens, plan, seconds)
    print(json.dumps(summary, indent=2))
    if plan:
        what = "{}: {seconds:.1f} s, {tokens:,} tokens, {bits_per_byte:.4} bits per byte"
        report(", ".join(what.format(name, **summary[name]) for name in ("planned", "reached")), prefix="")
    print(f"{folder}/ holds the checkpoints, metrics.csv, loss.png and summary.json")
    how = "--interactive" if data.prepared.template else "--prompt 'The '"
    print(f"next: gpt generate --checkpoint {folder} {how}")
