"""Which options of Lightning's Trainer `gpt fit` refuses, what to use instead, and what others come to.

docs/options.md has a table of all options. A test compares it with this file and the Trainer's signature.
"""

from typing import Any

import torch
from lightning.pytorch import Trainer

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
    "profiler": ((None,), "give --profile"),
    "barebones": ((False,), "give --log_every and --checkpoint_every high values"),
    "sync_batchnorm": ((False,), "the model has no batch normalisation"),
    "reload_dataloaders_every_n_epochs": ((0,), "the text does not change during a run"),
    "default_root_dir": ((None,), "name the run's folder with --run"),
    "enable_autolog_hparams": ((True,), "the run's config.yaml has all options"),
    "model_registry": ((None,), "upload the checkpoint yourself"),
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
    for name, least in (("accumulate_grad_batches", 1), ("gradient_clip_val", 0)):
        if (value := options.get(name)) is not None and value < least:
            raise InputError(f"--trainer.{name} {value} is not supported: give at least {least}")
    if options.get("limit_train_batches") == 0:
        raise InputError("--trainer.limit_train_batches 0 is not supported: give at least 1, or 1.0 for all")
    if options.get("accelerator") == "gpu" and not torch.accelerator.is_available():
        raise InputError("--trainer.accelerator gpu: there is no GPU that PyTorch can use; give cpu or auto")
    if str(options.get("precision")) in ("16-true", "16"):
        raise InputError("--trainer.precision 16-true is not supported: give 16-mixed or bf16-mixed")
    if options.get("deterministic") == "warn":  # attention's backward pass would not be
        raise InputError("--trainer.deterministic warn is not supported: give true or false")
    validation = options.get("limit_val_batches")
    if validation not in (None, 0, 1) or (validation == 1 and isinstance(validation, int)):
        raise InputError(
            f"--trainer.limit_val_batches {validation} is not supported: bits per byte need all of the "
            "validation text; give 0 or 1.0, or a smaller --data.val_fraction"
        )
    interval = options.get("val_check_interval")
    if interval is not None and not (isinstance(interval, int) and interval > 0):  # not parts of an epoch
        raise InputError(f"--trainer.val_check_interval must be a positive, whole number, got {interval}")
    callbacks = options.get("callbacks") or []
    for callback in callbacks if isinstance(callbacks, list) else [callbacks]:
        path = callback.get("class_path", "") if hasattr(callback, "get") else callback
        name = str(path).rpartition(".")[2]
        for instead, names in _OTHER_LOOPS.items():
            if name in names:
                raise InputError(f"the callback {name} is not supported: give {instead}")


def steps_per_epoch(trainer: Trainer) -> int:
    """Updates in one pass over the data module's training batches."""
    batches = len(trainer.datamodule.train_dataloader())  # type: ignore[attr-defined]
    limit = trainer.limit_train_batches
    batches = min(batches, limit) if isinstance(limit, int) else int(batches * (limit or 1.0))
    return max(1, -(-batches // trainer.accumulate_grad_batches))
