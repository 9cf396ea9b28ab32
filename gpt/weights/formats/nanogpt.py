"""nanoGPT's checkpoint, ckpt.pt: Hugging Face's names with matrices as (out, in), the shape in `model_args`.

nanoGPT computes the exact GELU, also with GPT-2's weights, which were trained with the tanh approximation.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gpt.config import GPTConfig
from gpt.errors import InputError
from gpt.files import atomic_write
from gpt.weights.formats import hf
from gpt.weights.formats.table import Weights, from_gpt, to_gpt

ROWS = [replace(row, transposed=False) for row in hf.ROWS]
_SKIPPED = r"transformer\.h\.\d+\.attn\.bias|lm_head\.weight"  # masks, and the head, which is always tied
_GELU = "gelu"  # a setting that nanoGPT does not know: an export records its GELU for the way back


def read_config(checkpoint: dict[str, Any]) -> GPTConfig:
    """The model of a checkpoint that `train.py` wrote.

    Raises:
        InputError: `model_args` lacks a size.
    """
    given = checkpoint["model_args"]
    settings = checkpoint.get("config")
    gelu = settings.get(_GELU, "exact") if isinstance(settings, dict) else "exact"
    try:
        return GPTConfig(
            vocab_size=given["vocab_size"],
            context_length=given["block_size"],
            emb_dim=given["n_embd"],
            num_heads=given["n_head"],
            num_layers=given["n_layer"],
            dropout=given.get("dropout", 0.0),
            exact_gelu=gelu == "exact",
        )
    except KeyError as error:
        raise InputError(f"model_args lacks {error}, expected those of a nanoGPT checkpoint") from None


def import_weights(config: GPTConfig, state: Weights) -> Weights:
    """Convert the state dict of nanoGPT's model; biases are zeros where it was trained without them.

    Raises:
        InputError: a tensor is missing, unknown, or of another shape; the message names it.
    """
    return to_gpt(config, state, ROWS, _SKIPPED, zero_biases="transformer.ln_f.bias" not in state)


def write(config: GPTConfig, weights: Weights, folder: Path) -> None:
    """Write ckpt.pt for `sample.py`; without the optimizer's state `train.py` cannot resume it.

    Raises:
        InputError: the head is not the token embedding, as it always is in nanoGPT.
        OSError: the folder cannot be written.
    """
    if not config.tie_embeddings:
        raise InputError("nanoGPT always ties the head to the token embedding; this model's head is untied")
    state = from_gpt(replace(config, qkv_bias=True), weights, ROWS)
    state["lm_head.weight"] = state["transformer.wte.weight"]
    checkpoint = {
        "model": state,
        "model_args": {
            "n_layer": config.num_layers,
            "n_head": config.num_heads,
            "n_embd": config.emb_dim,
            "block_size": config.context_length,
            "bias": True,
            "vocab_size": config.vocab_size,
            "dropout": config.dropout,
        },
        "iter_num": 0,
        "best_val_loss": float("inf"),
        "config": {_GELU: "exact" if config.exact_gelu else "tanh"},
    }
    with atomic_write(folder / "ckpt.pt", "wb") as file:
        torch.save(checkpoint, file)
