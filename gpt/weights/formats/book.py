"""The GPTModel of "Build a Large Language Model (From Scratch)" (Raschka 2024, chapter 4).

Its state dict lacks the number of heads: a config.json beside it has them, or it has one of GPT-2's sizes.
"""

import re
from pathlib import Path
from typing import Any

import torch

from gpt.config import GPTConfig
from gpt.errors import InputError
from gpt.files import atomic_write, write_json
from gpt.weights.formats.table import Row, Weights, from_gpt, to_gpt

_NORM = ("scale", "shift")
ROWS = [
    Row("tok_emb", ("token_embedding",)),
    Row("pos_emb", ("position_embedding",)),
    Row("trf_blocks.{}.att.W_query", ("blocks.{}.attention.W_query",)),
    Row("trf_blocks.{}.att.W_key", ("blocks.{}.attention.W_key",)),
    Row("trf_blocks.{}.att.W_value", ("blocks.{}.attention.W_value",)),
    Row("trf_blocks.{}.att.out_proj", ("blocks.{}.attention.out_proj",)),
    Row("trf_blocks.{}.ff.layers.0", ("blocks.{}.feed_forward.up",)),
    Row("trf_blocks.{}.ff.layers.2", ("blocks.{}.feed_forward.down",)),
    Row("trf_blocks.{}.norm1", ("blocks.{}.attention_norm",), parameters=_NORM),
    Row("trf_blocks.{}.norm2", ("blocks.{}.feed_forward_norm",), parameters=_NORM),
    Row("final_norm", ("final_norm",), parameters=_NORM),
    Row("out_head", ("head",)),
]
_SKIPPED = r"trf_blocks\.\d+\.att\.mask|out_head\.weight"  # masks, and a tied head


def read(state: Weights, given: dict[str, Any], num_heads: int | None) -> tuple[GPTConfig, Weights]:
    """The model that a state dict holds; arguments as `read_config`, errors as `to_gpt`."""
    config = read_config(state, given, num_heads)
    return config, to_gpt(config, state, ROWS, _SKIPPED)


def read_config(state: Weights, given: dict[str, Any], num_heads: int | None = None) -> GPTConfig:
    """The shape of a state dict; `given` is the book's configuration, or empty, `num_heads` overrides it."""
    for name in ("tok_emb.weight", "pos_emb.weight"):
        if name not in state or state[name].dim() != 2:
            raise InputError(f"the weights lack {name} of shape (rows, emb_dim)")
    vocab_size, emb_dim = state["tok_emb.weight"].shape
    blocks = [re.match(r"trf_blocks\.(\d+)\.", name) for name in state]
    num_layers = 1 + max((int(block[1]) for block in blocks if block), default=-1)
    sizes = map(GPTConfig.from_name, GPTConfig.names())
    known = {(size.emb_dim, size.num_layers): size.num_heads for size in sizes}
    heads = num_heads or given.get("n_heads") or known.get((emb_dim, num_layers))
    if heads is None:
        dimensions = f"{num_layers} blocks of width {emb_dim}"
        raise InputError(f"a state dict of {dimensions} does not contain its number of heads: give num_heads")
    head = state.get("out_head.weight")
    return GPTConfig(
        vocab_size=vocab_size,
        context_length=state["pos_emb.weight"].shape[0],
        emb_dim=emb_dim,
        num_heads=heads,
        num_layers=num_layers,
        dropout=given.get("drop_rate", 0.0),
        qkv_bias="trf_blocks.0.att.W_query.bias" in state,
        tie_embeddings=head is not None and torch.equal(head, state["tok_emb.weight"]),
    )


def write(config: GPTConfig, weights: Weights, folder: Path) -> None:
    """Write model.pth, with the masks and the head that GPTModel always stores, and its configuration."""
    state = from_gpt(config, weights, ROWS)
    if config.tie_embeddings:
        state["out_head.weight"] = state["tok_emb.weight"]
    mask = torch.ones(config.context_length, config.context_length).triu(diagonal=1)
    state |= {f"trf_blocks.{block}.att.mask": mask for block in range(config.num_layers)}
    with atomic_write(folder / "model.pth", "wb") as file:
        torch.save(state, file)
    same = {name: getattr(config, name) for name in ("vocab_size", "context_length", "emb_dim", "qkv_bias")}
    other = {"n_heads": config.num_heads, "n_layers": config.num_layers, "drop_rate": config.dropout}
    write_json(folder / "config.json", {**same, **other})
