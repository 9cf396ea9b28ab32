"""The GPTModel of "Build a Large Language Model (From Scratch)" (Raschka 2024, chapter 4).

Its state dict lacks the number of heads: a config.json beside it has it, or GPT-2's sizes tell it.
"""

from pathlib import Path

import torch

from gpt.config import GPTConfig
from gpt.errors import InputError
from gpt.files import atomic_write, write_json
from gpt.plain import JsonObject
from gpt.weights.formats.table import Weights, from_gpt, layer, row, to_gpt

TABLE = (
    row("tok_emb.weight", "token_embedding.weight"),
    row("pos_emb.weight", "position_embedding.weight"),
    *layer("trf_blocks.{}.att.W_query", "blocks.{}.attention.W_query"),
    *layer("trf_blocks.{}.att.W_key", "blocks.{}.attention.W_key"),
    *layer("trf_blocks.{}.att.W_value", "blocks.{}.attention.W_value"),
    *layer("trf_blocks.{}.att.out_proj", "blocks.{}.attention.out_proj"),
    *layer("trf_blocks.{}.ff.layers.0", "blocks.{}.feed_forward.up"),
    *layer("trf_blocks.{}.ff.layers.2", "blocks.{}.feed_forward.down"),
    row("trf_blocks.{}.norm1.scale", "blocks.{}.attention_norm.weight"),
    row("trf_blocks.{}.norm1.shift", "blocks.{}.attention_norm.bias"),
    row("trf_blocks.{}.norm2.scale", "blocks.{}.feed_forward_norm.weight"),
    row("trf_blocks.{}.norm2.shift", "blocks.{}.feed_forward_norm.bias"),
    row("final_norm.scale", "final_norm.weight"),
    row("final_norm.shift", "final_norm.bias"),
    row("out_head.weight", "head.weight"),
)


def read(state: Weights, given: JsonObject) -> tuple[GPTConfig, Weights]:
    """Convert a state dict; `given` is the book's configuration, or empty. Raises the errors of `to_gpt`."""
    for name in ("tok_emb.weight", "pos_emb.weight"):
        if name not in state or state[name].dim() != 2:
            raise InputError("no checkpoint of gpt fit or nanoGPT, and no state dict of the book's GPTModel")
    vocab_size, emb_dim = state["tok_emb.weight"].shape
    num_heads = given.get("n_heads", _usual_heads(emb_dim))
    if num_heads is None:
        what = f"a state dict of width {emb_dim} does not hold its number of heads"
        raise InputError(f'{what}: write {{"n_heads": NUMBER}} into config.json beside it')
    head = state.get("out_head.weight")
    config = GPTConfig(
        vocab_size=vocab_size,
        context_length=len(state["pos_emb.weight"]),
        emb_dim=emb_dim,
        num_heads=num_heads,
        num_layers=sum(name.endswith("norm1.scale") for name in state),
        dropout=given.get("drop_rate", 0.0),
        qkv_bias="trf_blocks.0.att.W_query.bias" in state,
        tie_embeddings=head is not None and torch.equal(head, state["tok_emb.weight"]),
    )
    return config, to_gpt(config, state, TABLE)


def _usual_heads(emb_dim: int) -> int | None:
    """Return the number of heads of GPT-2's size of this width; None if none has it."""
    for name in GPTConfig.names():
        size = GPTConfig.from_name(name)
        if size.emb_dim == emb_dim:
            return size.num_heads
    return None


def write(config: GPTConfig, weights: Weights, folder: Path) -> None:
    """Write model.pth, with the masks and the head that GPTModel always stores, and its configuration."""
    state = from_gpt(config, weights, TABLE)
    if config.tie_embeddings:
        state["out_head.weight"] = state["tok_emb.weight"]
    mask = torch.ones(config.context_length, config.context_length).triu(diagonal=1)
    state |= {f"trf_blocks.{block}.att.mask": mask for block in range(config.num_layers)}
    with atomic_write(folder / "model.pth", "wb") as file:
        torch.save(state, file)
    same = {name: getattr(config, name) for name in ("vocab_size", "context_length", "emb_dim", "qkv_bias")}
    other = {"n_heads": config.num_heads, "n_layers": config.num_layers, "drop_rate": config.dropout}
    write_json(folder / "config.json", {**same, **other})
