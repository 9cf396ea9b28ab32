"""What people meant by an unknown option: the names that other programs have, and typos."""

import difflib
from collections.abc import Iterable

ELSEWHERE = {
    # nanoGPT
    "max_iters": "trainer.max_steps",
    "lr_decay_iters": "trainer.max_steps",
    "eval_interval": "trainer.val_check_interval",
    "log_interval": "log_every",
    "block_size": "model.config.context_length",
    "n_layer": "model.config.num_layers",
    "n_head": "model.config.num_heads",
    "n_embd": "model.config.emb_dim",
    "bias": "model.config.qkv_bias",
    "dropout": "model.config.dropout",
    "learning_rate": "model.optimizer.lr",
    "min_lr": "model.optimizer.final_lr_fraction",
    "warmup_iters": "model.optimizer.warmup_steps",
    "grad_clip": "trainer.gradient_clip_val",
    "gradient_accumulation_steps": "trainer.accumulate_grad_batches",
    "dtype": "trainer.precision",
    "device": "trainer.accelerator",
    "dataset": "data.corpus",
    "out_dir": "run",
    "init_from": "model.init_from",
    # transformers
    "num_train_epochs": "trainer.max_epochs",
    "per_device_train_batch_size": "data.batch_size",
    "train_batch_size": "data.batch_size",
    "max_grad_norm": "trainer.gradient_clip_val",
    "lr_scheduler_type": "model.optimizer.schedule",
    "warmup_ratio": "model.optimizer.warmup_steps",
    "gradient_checkpointing": "model.checkpoint_activations",
    "model_name_or_path": "model.init_from",
    "resume_from_checkpoint": "resume",
    "output_dir": "run",
    "train_file": "data.corpus",
    "report_to": "trainer.logger",
    "save_steps": "checkpoint_every",
    "eval_steps": "trainer.val_check_interval",
    "logging_steps": "log_every",
    "save_total_limit": "keep_checkpoints",
    "fp16": "trainer.precision",
    "bf16": "trainer.precision",
    "seed": "seed_everything",
    "epochs": "trainer.max_epochs",
    "steps": "trainer.max_steps",
    # Lightning's Trainer
    "callbacks": "trainer.logger",
    "fast_dev_run": "trainer.max_steps",
    "barebones": "log_every",
    "check_val_every_n_epoch": "trainer.val_check_interval",
    "log_every_n_steps": "log_every",
    "default_root_dir": "run",
    "text": "data.corpus",
    "data": "data.corpus",
    "corpus": "data.corpus",
    "time": "minutes",
}
"""Names elsewhere by ours."""

VALUES = {
    "trainer.precision": {
        "fp16": "16-mixed",
        "16": "16-mixed",
        "bf16": "bf16-mixed",
        "fp32": "32-true",
        "32": "32-true",
    },
    "trainer.strategy": {"fsdp": "fsdp2", "ddp_spawn": "ddp", "ddp_fork": "ddp"},
    "model.optimizer.name": {"adam": "adamw"},
}
"""Values elsewhere, with our own, by option."""


def meant(name: str, options: Iterable[str]) -> str:
    """What to say after an unknown option's name: the nearest one, if any is near."""
    options = list(options)
    last = name.rpartition(".")[2]
    near = [option for option in options if option.rpartition(".")[2] == last]
    near = near or [option for option in (ELSEWHERE.get(name), ELSEWHERE.get(last)) if option][:1]
    near = near or difflib.get_close_matches(name, options, 1)
    if not near:
        ends = {option.rpartition(".")[2]: option for option in options}
        near = [ends[end] for end in difflib.get_close_matches(last, ends, 1)]
    return f"; did you mean {' or '.join(f'--{option}' for option in near)}?" if near else ""
