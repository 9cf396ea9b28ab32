"""Which options of Lightning's Trainer `gpt fit` honours, and what to use instead of the others.

docs/options.md has this as a table; a test compares both with the Trainer's own signature.
"""

from typing import Any

from gpt.errors import InputError

HONOURED = {
    "accelerator": "",
    "strategy": "`fsdp2` shards weights and optimizer states",
    "devices": "",
    "num_nodes": "",
    "precision": "not `16-true`: its updates vanish; the default is what suits the device",
    "logger": "in addition to metrics.csv; `false` switches TensorBoard off",
    "callbacks": "not those that train or stop in another way, see below",
    "max_epochs": "becomes a number of steps; with several limits the first one ends the run",
    "max_steps": "updates; with several limits the first one ends the run",
    "max_time": "training time over all resumes; the learning rate reaches its end as the time runs out",
    "min_steps": "early stopping and max_time wait for it",
    "limit_train_batches": "makes an epoch shorter",
    "limit_val_batches": "0 for no validation, 1.0 for all of it",
    "val_check_interval": "batches, rounded up to whole updates; with --data.tokens_per_update updates",
    "enable_progress_bar": "",
    "enable_model_summary": "",
    "accumulate_grad_batches": "follows from --data.tokens_per_update where that is given",
    "gradient_clip_val": "by the norm of all gradients",
    "deterministic": "",
    "benchmark": "",
    "inference_mode": "in `gpt validate`",
    "detect_anomaly": "",
    "plugins": "but no CheckpointIO",
}

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

_OTHER_LOOPS = {  # callbacks of Lightning that change how a run trains, ends or saves
    "Timer": "--trainer.max_time",
    "EarlyStopping": "--early_stopping",
    "ModelCheckpoint": "--checkpoint_every",
    "OnExceptionCheckpoint": "--checkpoint_every",
    "StochasticWeightAveraging": "--model.optimizer.schedule",
    "WeightAveraging": "--model.optimizer.schedule",
    "EMAWeightAveraging": "--model.optimizer.schedule",
    "GradientAccumulationScheduler": "--trainer.accumulate_grad_batches",
    "BatchSizeFinder": "--data.batch_size",
    "LearningRateFinder": "--model.optimizer.lr",
    "BackboneFinetuning": "--model.optimizer.lr",
    "ModelPruning": "--model.config",
}


def check_trainer_options(options: dict[str, Any]) -> None:
    """Refuse what `gpt fit` would not do as its name says.

    Args:
        options: the Trainer's, by name; callbacks as `class_path` mappings.

    Raises:
        InputError: an option is refused; the message says what to use.
    """
    for name, (allowed, instead) in REFUSED.items():
        value = options.get(name, allowed[0])
        if not any(value == other and type(value) is type(other) for other in allowed):
            raise InputError(f"--trainer.{name} {value} is not supported: {instead}")
    if str(options.get("precision")) in ("16-true", "16"):
        raise InputError("--trainer.precision 16-true is not supported: give 16-mixed or bf16-mixed")
    validation = options.get("limit_val_batches")
    if validation is not None and not (
        validation == 0 or (validation == 1 and isinstance(validation, float))
    ):
        raise InputError(
            f"--trainer.limit_val_batches {validation} is not supported: bits per byte need all of the "
            "validation text; give 0 or 1.0, or a smaller --data.val_fraction"
        )
    interval = options.get("val_check_interval")
    if interval is not None and not (isinstance(interval, int) and interval > 0) and interval != 1.0:
        raise InputError(f"--trainer.val_check_interval must be a positive number of batches, got {interval}")
    callbacks = options.get("callbacks") or []
    for callback in callbacks if isinstance(callbacks, list) else [callbacks]:
        name = str(callback.get("class_path", "") if hasattr(callback, "get") else callback).rpartition(".")[
            2
        ]
        if name in _OTHER_LOOPS:
            raise InputError(f"the callback {name} is not supported: give {_OTHER_LOOPS[name]}")
