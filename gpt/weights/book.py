"""The state dict of GPTModel in "Build a Large Language Model (From Scratch)" (Raschka 2024, chapter 4).

A state dict alone does not say how many heads there are. An export puts the book's configuration beside it;
without one the four sizes of GPT-2 are known by their shape.
"""

import re
from typing import Any

import torch

from gpt.config import GPTConfig
from gpt.errors import InputError
from gpt.weights.table import Row, Weights, from_gpt, linear, to_gpt

_PASSED_OVER = r"trf_blocks\.\d+\.att\.mask|out_head\.weight"


def read_config(state: Weights, given: dict[str, Any], num_heads: int | None = None) -> GPTConfig:
    """The model that a state dict holds.

    Args:
        state: the tensors by name.
        given: the book's configuration, which it calls GPT_CONFIG_124M, or {} without one.
        num_heads: overrides what it says.

    Raises:
        InputError: the number of heads is nowhere to be found, or an embedding is missing.
    """
    for name in ("tok_emb.weight", "pos_emb.weight"):
        if name not in state or state[name].dim() != 2:
            raise InputError(f"the weights lack {name} of shape (rows, emb_dim)")
    vocab_size, emb_dim = state["tok_emb.weight"].shape
    blocks = [re.match(r"trf_blocks\.(\d+)\.", name) for name in state]
    num_layers = 1 + max((int(block[1]) for block in blocks if block), default=-1)
    heads = num_heads or given.get("n_heads") or _known_heads(emb_dim, num_layers)
    if heads is None:
        raise InputError(
            f"a state dict of {num_layers} blocks of width {emb_dim} does not say its number of heads: "
            "give num_heads"
        )
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


def write_config(config: GPTConfig) -> dict[str, Any]:
    """The configuration from which the book's GPTModel is built."""
    return {
        "vocab_size": config.vocab_size,
        "context_length": config.context_length,
        "emb_dim": config.emb_dim,
        "n_heads": config.num_heads,
        "n_layers": config.num_layers,
        "drop_rate": config.dropout,
        "qkv_bias": config.qkv_bias,
    }


def import_weights(config: GPTConfig, state: Weights) -> Weights:
    """The book's state dict as a GPT's.

    Raises:
        InputError: a tensor is missing, unknown, or of another shape; the message names it.
    """
    return to_gpt(state, _rows(config), _PASSED_OVER)


def export_weights(config: GPTConfig, weights: Weights) -> Weights:
    """A GPT's state dict as the book's, which holds the masks, and the head also where it is tied."""
    state = from_gpt(weights, _rows(config))
    if config.tie_embeddings:
        state["out_head.weight"] = state["tok_emb.weight"]
    mask = torch.ones(config.context_length, config.context_length).triu(diagonal=1)
    return {**state, **{f"trf_blocks.{block}.att.mask": mask for block in range(config.num_layers)}}


def _known_heads(emb_dim: int, num_layers: int) -> int | None:
    """The heads of the GPT-2 of this shape."""
    for name in GPTConfig.names():
        size = GPTConfig.from_name(name)
        if (size.emb_dim, size.num_layers) == (emb_dim, num_layers):
            return size.num_heads
    return None


def _rows(config: GPTConfig) -> list[Row]:
    width = config.emb_dim
    tokens, positions = (config.vocab_size, width), (config.context_length, width)
    table = [
        Row(theirs="tok_emb.weight", ours=("token_embedding.weight",), shape=tokens),
        Row(theirs="pos_emb.weight", ours=("position_embedding.weight",), shape=positions),
    ]
    for block in range(config.num_layers):
        here, there = f"blocks.{block}", f"trf_blocks.{block}"
        for name in ("W_query", "W_key", "W_value"):
            ours = [f"{here}.attention.{name}"]
            table += linear(f"{there}.att.{name}", ours, width, width, bias=config.qkv_bias)
        table += linear(f"{there}.att.out_proj", [f"{here}.attention.out_proj"], width, width)
        table += linear(f"{there}.ff.layers.0", [f"{here}.feed_forward.up"], width, 4 * width)
        table += linear(f"{there}.ff.layers.2", [f"{here}.feed_forward.down"], 4 * width, width)
        table += _norm(f"{there}.norm1", f"{here}.attention_norm", width)
        table += _norm(f"{there}.norm2", f"{here}.feed_forward_norm", width)
    table += _norm("final_norm", "final_norm", width)
    if not config.tie_embeddings:
        table += linear("out_head", ["head"], width, config.vocab_size, bias=False)
    return table


def _norm(theirs: str, ours: str, width: int) -> list[Row]:
    """The rows of a LayerNorm, (D,) each."""
    names = (("scale", "weight"), ("shift", "bias"))
    return [Row(theirs=f"{theirs}.{t}", ours=(f"{ours}.{o}",), shape=(width,)) for t, o in names]
