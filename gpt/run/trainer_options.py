"""Which options of Lightning's Trainer `gpt fit` refuses; docs/options.md has a table of all of them."""

import os
from collections.abc import Callable
from typing import Any

import torch

from gpt.errors import InputError

# The values that change nothing, and what to use instead of the option.
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "fast_dev_run": ((False, 0), "give --trainer.max_steps 2"),
    "min_epochs": ((None, 0), "give --trainer.min_steps"),
    "limit_test_batches": ((None,), "there is no test split"),
    "limit_predict_batches": ((None,), "there is nothing to predict: see gpt generate"),
    "overfit_batches": ((0, 0.0), "give a small text and --data.val_fraction 0.5"),
    "check_val_every_n_epoch": ((None,), "give --trainer.val_check_interval in batches"),
    "num_sanity_val_steps": ((None, 0), "the data is checked before the run begins"),
    "log_every_n_steps": ((None,), "give --log_every"),
    "enable_checkpointing": ((None, True), "a run always saves; give --checkpoint_every"),
    "gradient_clip_algorithm": ((None, "norm"), "gradients are clipped by norm"),
    "use_distributed_sampler": ((False,), "the data loader gives each process its part"),
    "barebones": ((False,), "give --log_every and --checkpoint_every high values"),
    "sync_batchnorm": ((False,), "the model has no batch normalisation"),
    "reload_dataloaders_every_n_epochs": ((0,), "the text does not change during a run"),
    "default_root_dir": ((None,), "name the run's folder with --run"),
    "enable_autolog_hparams": ((True,), "the run's config.yaml has all options"),
    "model_registry": ((None,), "upload the checkpoint yourself"),
}

# Values that would do something else than they say, and what to give instead.
_LIMITED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "accumulate_grad_batches": (lambda v: v < 1, "give at least 1"),
    "gradient_clip_val": (lambda v: v < 0, "give at least 0"),
    "limit_train_batches": (lambda v: v == 0, "give at least 1, or 1.0 for all"),
    "limit_val_batches": (
        lambda v: v not in (0, 1) or (v == 1 and isinstance(v, int)),
        "bits per byte need all of the validation text; give 0 or 1.0, or a smaller --data.val_fraction",
    ),
    "val_check_interval": (lambda v: not isinstance(v, int) or v < 1, "give a positive, whole number"),
    "accelerator": (
        lambda v: v == "gpu" and not torch.accelerator.is_available(),
        "there is no GPU that PyTorch can use; give cpu or auto",
    ),
    "precision": (lambda v: str(v) in ("16-true", "16"), "give 16-mixed or bf16-mixed"),
    "strategy": (
        lambda v: str(v).startswith(("ddp_spawn", "ddp_fork", "ddp_notebook")),
        "give ddp, which starts each process anew",
    ),
    "deterministic": (lambda v: v == "warn", "give true or false: attention's backward pass would not be"),
    "num_nodes": (
        lambda v: v > 1 and not {"MASTER_ADDR", "SLURM_JOB_ID"} & set(os.environ),
        "start its processes with torchrun or SLURM (docs/reliability.md), or set MASTER_ADDR and NODE_RANK",
    ),
    "profiler": (lambda v: isinstance(v, str), "give --profile, or a class with dirpath and filename"),
}

# Callbacks of Lightning that change how a run trains, ends or saves, by what to use instead.
_OTHER_LOOPS = {
    "--trainer.max_time": ("Timer",),
    "--early_stopping": ("EarlyStopping",),
    "--checkpoint_every": ("ModelCheckpoint", "OnExceptionCheckpoint"),
    "--model.optimizer.schedule": ("StochasticWeightAveraging", "WeightAveraging", "EMAWeightAveraging"),
    "--trainer.accumulate_grad_batches": ("GradientAccumulationScheduler",),
    "--data.batch_size": ("BatchSizeFinder",),
    "--model.optimizer.lr": ("LearningRateFinder", "BackboneFinetuning"),
    "--model.config": ("ModelPruning",),
}


def check_trainer_options(options: dict[str, Any]) -> None:
    """Refuse, with an InputError, an option of the Trainer that `gpt fit` would not follow."""
    for name, (allowed, instead) in REFUSED.items():
        value = options.get(name, allowed[0])
        if not any(value == other and type(value) is type(other) for other in allowed):
            raise InputError(f"--trainer.{name} {value} is not supported: {instead}")
    for name, (refused, instead) in _LIMITED.items():
        if (value := options.get(name)) is not None and refused(value):
            raise InputError(f"--trainer.{name} {value} is not supported: {instead}")
    callbacks = options.get("callbacks") or []
    for callback in callbacks if isinstance(callbacks, list) else [callbacks]:
        name = callback["class_path"].rpartition(".")[2]
        for instead, names in _OTHER_LOOPS.items():
            if name in names:
                raise InputError(f"the callback {name} is not supported: give {instead}")
