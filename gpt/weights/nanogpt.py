"""nanoGPT's checkpoints: Hugging Face's names with matrices as (out, in), the shape under `model_args`.

nanoGPT computes the exact GELU, on GPT-2's weights too, which were trained with the approximation.
"""

from typing import Any

import torch

from gpt.config import GPTConfig
from gpt.errors import InputError
from gpt.weights import hf
from gpt.weights.table import Weights, from_gpt, to_gpt

_PASSED_OVER = r"transformer\.h\.\d+\.attn\.bias|lm_head\.weight"
_GELU = "gelu"  # not nanoGPT's: what an export says of itself, so that its way back is exact


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
    """The state dict of nanoGPT's model as a GPT's; where it was trained without biases they are zeros.

    Raises:
        InputError: a tensor is missing, unknown, or of another shape; the message names it.
    """
    rows = hf.rows(config, transposed=False)
    if "transformer.ln_f.bias" not in state:
        zeros = {row.theirs: torch.zeros(row.shape) for row in rows if row.theirs.endswith(".bias")}
        state = {**zeros, **state}
    return to_gpt(state, rows, _PASSED_OVER)


def export_checkpoint(config: GPTConfig, weights: Weights) -> dict[str, Any]:
    """What `sample.py` reads as ckpt.pt; there is no optimizer state in it, so `train.py` cannot resume it.

    Raises:
        InputError: the head is not the token embedding, as it always is in nanoGPT.
    """
    if not config.tie_embeddings:
        raise InputError("nanoGPT has no head of its own: this model's differs from its token embedding")
    state = from_gpt(weights, hf.rows(config, transposed=False))
    state["lm_head.weight"] = state["transformer.wte.weight"]
    return {
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
