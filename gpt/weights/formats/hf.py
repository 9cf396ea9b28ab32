"""GPT-2 as transformers stores it: config.json, GPT2LMHeadModel's state dict, the tokenizer's files."""

from dataclasses import asdict
from pathlib import Path

from gpt.config import GPTConfig
from gpt.errors import InputError
from gpt.files import write_json
from gpt.plain import JsonObject, build
from gpt.text.table import END_OF_TEXT, to_json
from gpt.text.template import Template
from gpt.text.tokenizer import Tokenizer
from gpt.weights.formats.table import Row, Table, Weights, from_gpt, to_gpt
from gpt.weights.tensors import read_json, write_tensors

TABLE = Table(
    (
        Row("transformer.wte.weight", ("token_embedding.weight",)),
        Row("transformer.wpe.weight", ("position_embedding.weight",)),
        Row("transformer.h.{}.ln_1.weight", ("blocks.{}.attention_norm.weight",)),
        Row("transformer.h.{}.ln_1.bias", ("blocks.{}.attention_norm.bias",)),
        Row(
            "transformer.h.{}.attn.c_attn.weight",
            (
                "blocks.{}.attention.W_query.weight",
                "blocks.{}.attention.W_key.weight",
                "blocks.{}.attention.W_value.weight",
            ),
            transposed=True,
        ),
        Row(
            "transformer.h.{}.attn.c_attn.bias",
            (
                "blocks.{}.attention.W_query.bias",
                "blocks.{}.attention.W_key.bias",
                "blocks.{}.attention.W_value.bias",
            ),
        ),
        Row("transformer.h.{}.attn.c_proj.weight", ("blocks.{}.attention.out_proj.weight",), transposed=True),
        Row("transformer.h.{}.attn.c_proj.bias", ("blocks.{}.attention.out_proj.bias",)),
        Row("transformer.h.{}.ln_2.weight", ("blocks.{}.feed_forward_norm.weight",)),
        Row("transformer.h.{}.ln_2.bias", ("blocks.{}.feed_forward_norm.bias",)),
        Row("transformer.h.{}.mlp.c_fc.weight", ("blocks.{}.feed_forward.up.weight",), transposed=True),
        Row("transformer.h.{}.mlp.c_fc.bias", ("blocks.{}.feed_forward.up.bias",)),
        Row("transformer.h.{}.mlp.c_proj.weight", ("blocks.{}.feed_forward.down.weight",), transposed=True),
        Row("transformer.h.{}.mlp.c_proj.bias", ("blocks.{}.feed_forward.down.bias",)),
        Row("transformer.ln_f.weight", ("final_norm.weight",)),
        Row("transformer.ln_f.bias", ("final_norm.bias",)),
        Row("lm_head.weight", ("head.weight",)),
    ),
    # Masks, and a tied head.
    skipped=frozenset({"transformer.h.{}.attn.bias", "transformer.h.{}.attn.masked_bias", "lm_head.weight"}),
)
_TEMPLATE = "minimal_gpt_template"  # key of the template's fields, as Jinja is not read
SIZES = {
    "vocab_size": "vocab_size",
    "n_positions": "context_length",
    "n_embd": "emb_dim",
    "n_layer": "num_layers",
    "n_head": "num_heads",
}
# Settings of which this GPT supports only one value; with another, the model would compute something else.
_FIXED = {
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}


def read(values: JsonObject, state: Weights) -> tuple[GPTConfig, Weights]:
    """Convert a config.json and the state dict of a GPT2LMHeadModel or a GPT2Model.

    The latter's names lack `transformer.`. Raises InputError for a model that this GPT cannot compute.
    """
    exact = values.get("activation_function") == "gelu"
    fixed = {
        "model_type": "gpt2",
        "n_inner": 4 * values.get("n_embd", 768),
        "activation_function": "gelu" if exact else "gelu_new",
        **_FIXED,
    }
    for name, expected in fixed.items():
        if (value := values.get(name)) not in (None, expected):
            raise InputError(f"{name} is {value!r} in config.json, expected {expected!r}")
    config = GPTConfig(  # sizes default to GPT-2 small's in both programs
        **{ours: values[theirs] for theirs, ours in SIZES.items() if theirs in values},
        dropout=values.get("resid_pdrop", 0.1),
        tie_embeddings=values.get("tie_word_embeddings", True),
        exact_gelu=exact,
    )
    if "wte.weight" in state:  # a GPT2Model's
        state = {_full_name(name): tensor for name, tensor in state.items()}
    return config, to_gpt(config, state, TABLE)


def _full_name(name: str) -> str:
    """Return the name in a GPT2LMHeadModel of a tensor of a GPT2Model, or of the head beside one."""
    return name if name == "lm_head.weight" else f"transformer.{name}"


def write(config: GPTConfig, weights: Weights, folder: Path) -> None:
    """Write the weights, without a tied head, and the configuration for transformers."""
    write_tensors(folder, from_gpt(config, weights, TABLE))
    settings = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        **{theirs: getattr(config, ours) for theirs, ours in SIZES.items()},
        "activation_function": "gelu" if config.exact_gelu else "gelu_new",
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), config.dropout),
        **_FIXED,
        "tie_word_embeddings": config.tie_embeddings,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), config.vocab_size - 1),
    }
    write_json(folder / "config.json", settings)


def write_tokenizer(
    tokenizer: Tokenizer, folder: Path, context_length: int, template: Template | None = None
) -> None:
    """Write the tokenizer's files, so that transformers and tokenizers give the same ids and chats.

    They encode `<|endoftext|>` in a text like `Tokenizer.encode` with `allow_special`.
    """
    write_json(folder / "tokenizer.json", to_json(tokenizer.tokens))
    settings: JsonObject = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), END_OF_TEXT),
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_length,
        # Without it transformers 4 adds token types, which its GPT-2 embeds like tokens.
        "model_input_names": ["input_ids", "attention_mask"],
    }
    if template:
        settings |= {"chat_template": template.to_jinja(), _TEMPLATE: asdict(template)}
    write_json(folder / "tokenizer_config.json", settings)


def read_template(folder: Path) -> Template | None:
    """Read the template that `write_tokenizer` wrote; other programs' Jinja templates are not read."""
    file = folder / "tokenizer_config.json"
    saved = read_json(file).get(_TEMPLATE) if file.is_file() else None
    return build(Template, saved) if saved else None
