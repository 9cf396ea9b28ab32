"""nanoGPT's ckpt.pt: Hugging Face's names, matrices as (out, in), the exact GELU."""

from dataclasses import replace
from pathlib import Path

import torch

from gpt.config import GPTConfig
from gpt.errors import InputError
from gpt.files import atomic_write
from gpt.plain import JsonObject
from gpt.weights.formats import hf
from gpt.weights.formats.table import Weights, from_gpt, to_gpt

_SIZES = {"block_size" if name == "n_positions" else name: ours for name, ours in hf.SIZES.items()}
TABLE = tuple(replace(row, transposed=False) for row in hf.TABLE)


def read(checkpoint: JsonObject, state: Weights) -> tuple[GPTConfig, Weights]:
    """Convert a checkpoint that nanoGPT's `train.py` wrote; missing biases are zeros.

    Raises InputError for one without nanoGPT's settings, and the errors of `to_gpt`.
    """
    given = checkpoint["model_args"]
    if not isinstance(given, dict) or not given.keys() >= _SIZES.keys():
        raise InputError(f"its model_args are not nanoGPT's settings: expected {', '.join(_SIZES)}")
    sizes = {ours: given[theirs] for theirs, ours in _SIZES.items()}
    config = GPTConfig(**sizes, dropout=given.get("dropout", 0.0), exact_gelu=True)
    zero_biases = "transformer.ln_f.bias" not in state
    return config, to_gpt(config, state, TABLE, zero_biases=zero_biases)


def write(config: GPTConfig, weights: Weights, folder: Path) -> None:
    """Write ckpt.pt for nanoGPT's `sample.py`; `train.py` cannot resume it without an optimizer's state."""
    if not config.tie_embeddings:
        raise InputError("nanoGPT always ties the head to the token embedding; this model's head is untied")
    state = from_gpt(config, weights, TABLE)
    state["lm_head.weight"] = state["transformer.wte.weight"]
    sizes = {theirs: getattr(config, ours) for theirs, ours in _SIZES.items()}
    checkpoint = {
        "model": state,
        "model_args": {**sizes, "bias": True, "dropout": config.dropout},
    }
    with atomic_write(folder / "ckpt.pt", "wb") as file:
        torch.save(checkpoint, file)
