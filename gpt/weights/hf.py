"""GPT-2 as Hugging Face's transformers keeps it: config.json, and weights by the names of GPT2LMHeadModel.

Its linear layers are called Conv1D and keep their matrices as (in, out); query, key and value are one.
"""

from typing import Any

from gpt.config import GPTConfig
from gpt.errors import InputError
from gpt.weights.table import Row, Weights, from_gpt, linear, to_gpt

# Masks are rebuilt from their length.
_PASSED_OVER = r"transformer\.h\.\d+\.attn\.(bias|masked_bias)|lm_head\.weight"
_EXACT_GELU = {"gelu_new": False, "gelu_pytorch_tanh": False, "gelu": True}
# What this GPT can only be in one way: a folder that says otherwise computes something else.
_FIXED = {
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}


def read_config(values: dict[str, Any]) -> GPTConfig:
    """The model that a config.json describes.

    Raises:
        InputError: another architecture, or a setting of GPT-2's that has no counterpart here.
    """
    if values.get("model_type") != "gpt2":
        raise InputError(f"expected a folder of model_type gpt2, got {values.get('model_type')!r}")
    for name, expected in _FIXED.items():
        if values.get(name, expected) != expected:
            raise InputError(f"{name} is {values[name]!r} in config.json, expected {expected!r}")
    width = values.get("n_embd", 768)
    if values.get("n_inner") not in (None, 4 * width):
        raise InputError(f"n_inner is {values['n_inner']} in config.json, expected {4 * width}")
    activation = values.get("activation_function", "gelu_new")
    if activation not in _EXACT_GELU:
        known = ", ".join(_EXACT_GELU)
        raise InputError(f"activation_function is {activation!r} in config.json, expected one of {known}")
    return GPTConfig(
        vocab_size=values.get("vocab_size", 50257),
        context_length=values.get("n_positions", 1024),
        emb_dim=width,
        num_heads=values.get("n_head", 12),
        num_layers=values.get("n_layer", 12),
        dropout=values.get("resid_pdrop", 0.1),
        tie_embeddings=values.get("tie_word_embeddings", True),
        exact_gelu=_EXACT_GELU[activation],
    )


def write_config(config: GPTConfig, end_of_text: int) -> dict[str, Any]:
    """The config.json from which transformers builds the same model."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "n_positions": config.context_length,
        "n_ctx": config.context_length,
        "n_embd": config.emb_dim,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_inner": None,
        "activation_function": "gelu" if config.exact_gelu else "gelu_new",
        "attn_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "resid_pdrop": config.dropout,
        "initializer_range": 0.02,
        **_FIXED,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "torch_dtype": "float32",
        "use_cache": True,
    }


def import_weights(config: GPTConfig, state: Weights) -> Weights:
    """The state dict of a GPT2LMHeadModel, or of a GPT2Model, which has no prefix, as a GPT's.

    Raises:
        InputError: a tensor is missing, unknown, or of another shape; the message names it.
    """
    if "wte.weight" in state:
        state = {name if name == "lm_head.weight" else f"transformer.{name}": t for name, t in state.items()}
    return to_gpt(state, rows(config), _PASSED_OVER)


def export_weights(config: GPTConfig, weights: Weights) -> Weights:
    """A GPT's state dict as a GPT2LMHeadModel's; a tied head is left out, as transformers does."""
    return from_gpt(weights, rows(config))


def rows(config: GPTConfig, *, transposed: bool = True) -> list[Row]:
    """The table of GPT2LMHeadModel's names, which nanoGPT has taken over with matrices as (out, in)."""
    width = config.emb_dim
    tokens, positions = (config.vocab_size, width), (config.context_length, width)
    table = [
        Row(theirs="transformer.wte.weight", ours=("token_embedding.weight",), shape=tokens),
        Row(theirs="transformer.wpe.weight", ours=("position_embedding.weight",), shape=positions),
    ]
    for block in range(config.num_layers):
        here, there = f"blocks.{block}", f"transformer.h.{block}"
        layers = (
            ("attn.c_attn", [f"attention.W_{name}" for name in ("query", "key", "value")], width, 3 * width),
            ("attn.c_proj", ["attention.out_proj"], width, width),
            ("mlp.c_fc", ["feed_forward.up"], width, 4 * width),
            ("mlp.c_proj", ["feed_forward.down"], 4 * width, width),
        )
        table += _norm(f"{there}.ln_1", f"{here}.attention_norm", width)
        table += _norm(f"{there}.ln_2", f"{here}.feed_forward_norm", width)
        for theirs, ours, d_in, d_out in layers:
            names = [f"{here}.{name}" for name in ours]
            table += linear(f"{there}.{theirs}", names, d_in, d_out, transposed=transposed)
    table += _norm("transformer.ln_f", "final_norm", width)
    if not config.tie_embeddings:
        table += linear("lm_head", ["head"], width, config.vocab_size, bias=False)
    return table


def _norm(theirs: str, ours: str, width: int) -> list[Row]:
    """The rows of a LayerNorm, (D,) each."""
    names = ("weight", "bias")
    return [Row(theirs=f"{theirs}.{name}", ours=(f"{ours}.{name}",), shape=(width,)) for name in names]
