"""The modules of a run: what its text, the weights that it begins with, and the machine decide."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch import seed_everything

from gpt.data.module import TokenData
from gpt.errors import InputError
from gpt.plain import as_dict
from gpt.run.lightning_private import started_processes
from gpt.run.limits import COMPILED_SECONDS
from gpt.run.options import Options
from gpt.text.template import DEFAULT_TEMPLATE
from gpt.text.tokenizer import Tokenizer
from gpt.threads import cores
from gpt.training.device import default_precision
from gpt.training.module import LanguageModel
from gpt.training.output import report
from gpt.weights.adapters import base_folder
from gpt.weights.checkpoint import Checkpoint
from gpt.weights.load import Found, read_weights


def build(options: Options, checkpoint: Checkpoint | None) -> tuple[Options, LanguageModel, TokenData]:
    """The options with all that was left open, and the modules of a Trainer, the text prepared.

    InputError where options contradict the weights that are given.
    """
    options = _of_machine(options)
    tokenizer = None
    found = None
    if checkpoint is not None:
        saved = checkpoint.model.tokenizer
        tokenizer = Tokenizer.from_dict(saved) if saved else None
    elif options.model.init_from is not None:
        options, found = _of_weights(options, options.model.init_from)
        tokenizer = found.tokenizer
    data = _token_data(options, tokenizer)
    model, config = options.model, options.model.config
    if tokenizer is None and checkpoint is None and options.data.vocabulary is not None:
        config = replace(config, vocab_size=data.tokenizer.n_vocab)
    model = replace(model, config=config)
    options = replace(options, model=model)
    if not data.prepared.counts["val"].tokens:
        options = replace(options, trainer=replace(options.trainer, limit_val_batches=0.0))
    if checkpoint:  # it has the weights, or the adapters
        model = replace(model, init_from=str(base_folder(checkpoint.path)) if model.lora.rank else None)
    seed_everything(options.seed_everything, verbose=False)
    try:
        module = LanguageModel(**as_dict(model))
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            raise InputError("the model does not fit into memory: make it smaller") from None
        raise
    if checkpoint:  # start.py has checked that they are all there
        module.model.load_state_dict(checkpoint.weights, strict=False)
    return options, module, data


def _of_machine(options: Options) -> Options:
    trainer, model = options.trainer, options.model
    precision: Any = trainer.precision or default_precision(trainer.accelerator)
    devices = trainer.devices or started_processes()
    if trainer.accelerator == "cpu" and devices > cores():
        report(f"{devices} processes on {cores()} cores: each waits for the others")
    if model.compile is None and (trainer.max_seconds or COMPILED_SECONDS) < COMPILED_SECONDS:
        model = replace(model, compile=False)
    return replace(options, model=model, trainer=replace(trainer, precision=precision, devices=devices))


def _of_weights(options: Options, path: str) -> tuple[Options, Found]:
    if options.data.vocabulary not in (None, "learn"):  # recipes say learn, for runs that start anew
        raise InputError("--data.vocabulary: weights to start from keep their own, leave it out")
    found = read_weights(path).cropped(options.model.config.context_length)
    config = replace(found.config, dropout=options.model.config.dropout)
    data = replace(options.data, vocabulary=None)
    if found.template and data.template == DEFAULT_TEMPLATE:
        data = replace(data, template=found.template)
    return replace(options, model=replace(options.model, config=config), data=data), found


def _token_data(options: Options, tokenizer: Tokenizer | None) -> TokenData:
    """The text of a run, encoded with the tokenizer of its weights where they have one."""
    config, seed = options.model.config, options.seed_everything
    sizes: dict[str, Any] = {"vocab_size": config.vocab_size, "context_length": config.context_length}
    new = partial(TokenData, **as_dict(options.data), **sizes, seed=seed)
    learns = (options.data.vocabulary or "").startswith("learn")
    data = new(tokenizer=None if learns else tokenizer)
    if tokenizer and data.tokenizer != tokenizer:  # it was learned from another text
        data = new(tokenizer=tokenizer)
    _ = data.prepared
    return data


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a GPU or a CPU: on a CPU torch raises a plain RuntimeError."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    told = str(error).lower() if isinstance(error, RuntimeError) else ""
    return "alloc" in told or "out of memory" in told
