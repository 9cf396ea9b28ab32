"""nanoGPT's ckpt.pt: Hugging Face's names, matrices as (out, in), the exact GELU."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gpt.config import GPTConfig
from gpt.errors import InputError
from gpt.files import atomic_write
from gpt.weights.formats import hf
from gpt.weights.formats.table import Weights, from_gpt, to_gpt
from gpt.weights.tensors import strip_prefixes

ROWS = [replace(row, transposed=False) for row in hf.ROWS]
_SIZES = {"block_size" if name == "n_positions" else name: ours for name, ours in hf.SIZES.items()}
_SKIPPED = r"transformer\.h\.\d+\.attn\.bias|lm_head\.weight"  # masks, and the head, which is always tied
_GELU = "gelu"  # a setting that nanoGPT does not know: an export records its GELU for the way back


def read(checkpoint: dict[str, Any]) -> tuple[GPTConfig, Weights]:
    """The model of a checkpoint that `train.py` wrote; missing biases are zeros."""
    given, settings = checkpoint["model_args"], checkpoint.get("config")
    gelu = settings.get(_GELU, "exact") if isinstance(settings, dict) else "exact"
    try:
        sizes = {ours: given[theirs] for theirs, ours in _SIZES.items()}
    except KeyError as error:
        raise InputError(f"model_args lacks {error}, expected those of a nanoGPT checkpoint") from None
    config = GPTConfig(**sizes, dropout=given.get("dropout", 0.0), exact_gelu=gelu == "exact")
    state = strip_prefixes(checkpoint["model"])
    return config, to_gpt(config, state, ROWS, _SKIPPED, zero_biases="transformer.ln_f.bias" not in state)


def write(config: GPTConfig, weights: Weights, folder: Path) -> None:
    """Write ckpt.pt for `sample.py`; without the optimizer's state `train.py` cannot resume it."""
    if not config.tie_embeddings:
        raise InputError("nanoGPT always ties the head to the token embedding; this model's head is untied")
    state = from_gpt(replace(config, qkv_bias=True), weights, ROWS)
    state["lm_head.weight"] = state["transformer.wte.weight"]
    sizes = {theirs: getattr(config, ours) for theirs, ours in _SIZES.items()}
    checkpoint = {
        "model": state,
        "model_args": {**sizes, "bias": True, "dropout": config.dropout},
        "iter_num": 0,
        "best_val_loss": float("inf"),
        "config": {_GELU: "exact" if config.exact_gelu else "tanh"},
    }
    with atomic_write(folder / "ckpt.pt", "wb") as file:
        torch.save(checkpoint, file)
