"""`gpt fit` and `gpt validate`: from a command line to a Trainer that runs."""

import json
import os
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer, seed_everything

from gpt import STARTED
from gpt.data.module import TokenData
from gpt.errors import InputError
from gpt.plain import as_dict
from gpt.progress import report
from gpt.run.lightning_private import cluster, silence_warnings
from gpt.run.loop import Loop
from gpt.run.options import Options
from gpt.run.record import write_summary
from gpt.run.signals import Stopped
from gpt.run.start import Start, start
from gpt.text.template import DEFAULT_TEMPLATE
from gpt.text.tokenizer import Tokenizer
from gpt.threads import cores, sharing_cores
from gpt.training.device import allow_tf32, default_precision, keep_freed_memory
from gpt.training.module import LanguageModel
from gpt.training.output import MayEnd
from gpt.weights.adapters import base_folder
from gpt.weights.load import Found

_COMPILED_SECONDS = 600.0  # a run limited to less time is not compiled unless asked to
# What Lightning raises for options that it cannot use, and for what SLURM says of the processes.
_REFUSALS = (MisconfigurationException, ValueError, RuntimeError)


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
        run = validate if command == "validate" else fit
        try:
            run(begun)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            what = "give a smaller --data.batch_size; with --data.tokens_per_update the updates stay the same"
            raise InputError(f"the model or a batch does not fit into memory: {what}") from error


def prepare_process() -> None:
    """Settings of the whole process."""
    silence_warnings()
    keep_freed_memory()
    allow_tf32()


def fit(begun: Start) -> None:
    """Train; a run that a signal ended exits with the status that the signal has in a shell."""
    report(*begun.notes)
    trainer, loop, module, data = assemble(begun)
    if begun.minutes and begun.weights and loop.options.trainer.limit_val_batches:
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
    except SystemExit as leaving:  # Lightning's answer to a Ctrl-C before the first step
        interrupted = isinstance(leaving.__context__, KeyboardInterrupt)
        raise (KeyboardInterrupt if interrupted else leaving) from None
    finally:
        loop.close()
    if trainer.is_global_zero:
        summarize(trainer, loop)


def assemble(begun: Start) -> tuple[Trainer, Loop, LanguageModel, TokenData]:
    """All parts of a run, its text prepared: what is wrong with it is found before there is a folder."""
    options, module, data = build(begun)
    loop = Loop(options, module, data, begun)
    return new_trainer(options, callbacks=[loop]), loop, module, data


def build(begun: Start) -> tuple[Options, LanguageModel, TokenData]:
    """The options with all that was left open, and the modules of a Trainer, the text prepared.

    InputError where options contradict the weights that are given.
    """
    options = _of_machine(begun)
    checkpoint = begun.checkpoint
    weights = begun.weights
    tokenizer = None
    if checkpoint:
        saved = checkpoint.model.tokenizer
        tokenizer = Tokenizer.from_dict(saved) if saved else None
    elif weights:
        options = _of_weights(options, weights)
        tokenizer = weights.tokenizer
    data = _token_data(options, tokenizer)
    model = options.model
    if tokenizer is None and checkpoint is None and options.data.vocabulary is not None:
        model = replace(model, config=replace(model.config, vocab_size=data.tokenizer.n_vocab))
    options = replace(options, model=model)
    if not data.prepared.counts["val"].tokens:
        options = replace(options, trainer=replace(options.trainer, limit_val_batches=0.0))
    if checkpoint:  # it has the weights, or the adapters
        model = replace(model, init_from=str(base_folder(checkpoint.path)) if model.lora.rank else None)
    seed_everything(options.seed_everything, verbose=False)
    module = LanguageModel(**as_dict(model))
    if checkpoint:  # start.py has checked that they are all there
        module.model.load_state_dict(checkpoint.weights, strict=False)
    return options, module, data


def _of_machine(begun: Start) -> Options:
    trainer = begun.options.trainer
    model = begun.options.model
    precision: Any = trainer.precision or default_precision(trainer.accelerator)
    devices = trainer.devices or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # that torchrun has started
    if trainer.accelerator == "cpu" and devices > cores():
        report(f"{devices} processes on {cores()} cores: each waits for the others")
    seconds = 60 * begun.minutes if begun.minutes else trainer.max_seconds
    if model.compile is None and (seconds or _COMPILED_SECONDS) < _COMPILED_SECONDS:
        model = replace(model, compile=False)
    return replace(begun.options, model=model, trainer=replace(trainer, precision=precision, devices=devices))


def _of_weights(options: Options, weights: Found) -> Options:
    if options.data.vocabulary not in (None, "learn"):  # recipes say learn, for runs that start anew
        raise InputError("--data.vocabulary: weights to start from keep their own, leave it out")
    shape = options.model.config
    config = replace(weights.cropped(shape.context_length).config, dropout=shape.dropout)
    data = replace(options.data, vocabulary=None)
    if weights.template and data.template == DEFAULT_TEMPLATE:
        data = replace(data, template=weights.template)
    return replace(options, model=replace(options.model, config=config), data=data)


def _token_data(options: Options, tokenizer: Tokenizer | None) -> TokenData:
    """The text of a run, encoded with the tokenizer of its weights where they have one."""
    config = options.model.config
    seed = options.seed_everything
    sizes: dict[str, Any] = {"vocab_size": config.vocab_size, "context_length": config.context_length}
    new = partial(TokenData, **as_dict(options.data), **sizes, seed=seed)
    learns = (options.data.vocabulary or "").startswith("learn")
    data = new(tokenizer=None if learns else tokenizer)
    if tokenizer and data.tokenizer != tokenizer:  # it was learned from another text
        data = new(tokenizer=tokenizer)
    return data


def validate(begun: Start) -> None:
    """Print the figures of a checkpoint on the text that is held out."""
    options, module, data = build(begun)
    plain = replace(options.trainer, limit_val_batches=1.0)
    trainer = new_trainer(replace(options, trainer=plain), callbacks=[])
    (metrics,) = trainer.validate(module, datamodule=data, verbose=False)
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
            max_epochs=-1,  # `Loop` ends training
            val_check_interval=1,  # and says when to validate
            check_val_every_n_epoch=None,
            limit_val_batches=plain.limit_val_batches,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,  # the loader shards by rank itself
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            logger=False,
            default_root_dir=os.devnull,  # where Lightning would look for checkpoints of SLURM
        )
    except _REFUSALS as error:
        raise InputError(f"the options cannot be used: {error}") from error


def summarize(trainer: Trainer, loop: Loop) -> None:
    """Print how it ended and what to do next."""
    plan = loop.begun.plan
    report(f"ended after step {loop.run.step}: {loop.limits.why()}", prefix="")
    folder = loop.folder
    seconds = time.perf_counter() - STARTED
    summary = write_summary(folder, loop.run, trainer, loop.tokens, plan, seconds)
    print(json.dumps(summary, indent=2))
    if plan:
        what = "{}: {seconds:.1f} s, {tokens:,} tokens, {bits_per_byte:.4} bits per byte"
        report(", ".join(what.format(name, **summary[name]) for name in ("planned", "reached")), prefix="")
    print(f"{folder}/ holds the checkpoints, metrics.csv, loss.png and summary.json")
    how = "--interactive" if loop.data.prepared.template else "--prompt 'The '"
    print(f"next: gpt generate --checkpoint {folder} {how}")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a GPU or a CPU: on a CPU torch raises a plain RuntimeError."""
    told = str(error).lower()
    return (
        isinstance(error, MemoryError | torch.OutOfMemoryError) or "alloc" in told or "out of memory" in told
    )
