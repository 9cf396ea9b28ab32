"""GPT-2 as transformers stores it: config.json, GPT2LMHeadModel's state dict, the tokenizer's files."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import save

from gpt.config import GPTConfig
from gpt.errors import InputError
from gpt.files import atomic_write, write_json
from gpt.text.table import END_OF_TEXT, to_json
from gpt.text.template import Template
from gpt.text.tokenizer import Tokenizer
from gpt.weights.formats.table import Row, Weights, from_gpt, to_gpt
from gpt.weights.tensors import read_json

_QKV = ("blocks.{}.attention.W_query", "blocks.{}.attention.W_key", "blocks.{}.attention.W_value")
ROWS = [
    Row("transformer.wte", ("token_embedding",)),
    Row("transformer.wpe", ("position_embedding",)),
    Row("transformer.h.{}.ln_1", ("blocks.{}.attention_norm",)),
    Row("transformer.h.{}.attn.c_attn", _QKV, transposed=True),
    Row("transformer.h.{}.attn.c_proj", ("blocks.{}.attention.out_proj",), transposed=True),
    Row("transformer.h.{}.ln_2", ("blocks.{}.feed_forward_norm",)),
    Row("transformer.h.{}.mlp.c_fc", ("blocks.{}.feed_forward.up",), transposed=True),
    Row("transformer.h.{}.mlp.c_proj", ("blocks.{}.feed_forward.down",), transposed=True),
    Row("transformer.ln_f", ("final_norm",)),
    Row("lm_head", ("head",)),
]
SIZES = {
    "vocab_size": "vocab_size",
    "n_positions": "context_length",
    "n_embd": "emb_dim",
    "n_layer": "num_layers",
    "n_head": "num_heads",
}
_SKIPPED = r"transformer\.h\.\d+\.attn\.(bias|masked_bias)|lm_head\.weight"  # masks, and a tied head
_EXACT_GELU = {"gelu_new": False, "gelu_pytorch_tanh": False, "gelu": True}
# Settings for which this GPT knows one value: with another, the folder's model computes something else.
_FIXED = {
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}


def read_config(values: dict[str, Any]) -> GPTConfig:
    """The model that a config.json describes; InputError if it is none that this GPT can compute."""
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
    return GPTConfig(  # of the sizes both have GPT-2 small's as defaults
        **{ours: values[theirs] for theirs, ours in SIZES.items() if theirs in values},
        dropout=values.get("resid_pdrop", 0.1),
        tie_embeddings=values.get("tie_word_embeddings", True),
        exact_gelu=_EXACT_GELU[activation],
    )


def import_weights(config: GPTConfig, state: Weights) -> Weights:
    """From the state dict of a GPT2LMHeadModel, or of a GPT2Model, whose names lack `transformer.`."""
    if "wte.weight" in state:
        state = {name if name == "lm_head.weight" else f"transformer.{name}": t for name, t in state.items()}
    return to_gpt(config, state, ROWS, _SKIPPED)


def write(config: GPTConfig, weights: Weights, folder: Path) -> None:
    """Write weights without a tied head, and the configuration, for transformers."""
    state = from_gpt(replace(config, qkv_bias=True), weights, ROWS)
    with atomic_write(folder / "model.safetensors", "wb") as file:
        file.write(save(state, metadata={"format": "pt"}))
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), config.vocab_size - 1)
    write_json(folder / "generation_config.json", special)
    settings = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        **{theirs: getattr(config, ours) for theirs, ours in SIZES.items()},
        "n_ctx": config.context_length,
        "activation_function": "gelu" if config.exact_gelu else "gelu_new",
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), config.dropout),
        **_FIXED,
        "tie_word_embeddings": config.tie_embeddings,
        **special,
        "torch_dtype": "float32",
    }
    write_json(folder / "config.json", settings)


def write_tokenizer(
    tokenizer: Tokenizer, folder: Path, context_length: int, template: Template | None = None
) -> None:
    """Write the files from which transformers and tokenizers produce the same ids, and the same chats.

    They encode `<|endoftext|>` in a text as `Tokenizer.encode` does with `allow_special`.
    """
    write_json(folder / "tokenizer.json", to_json(tokenizer.tokens, tokenizer.pattern))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        **dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), END_OF_TEXT),
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_length,
        # Without it transformers 4 adds token types, which its GPT-2 looks up among the tokens.
        "model_input_names": ["input_ids", "attention_mask"],
        **({"chat_template": template.to_jinja()} if template else {}),
    }
    write_json(folder / "tokenizer_config.json", settings)


def read_template(folder: Path) -> Template | None:
    """The template that `write_tokenizer` wrote; None, and a line, for that of another program."""
    jinja, settings = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    text = read_json(settings).get("chat_template") if settings.is_file() else None
    if jinja.is_file():  # where transformers puts it
        text = jinja.read_text(encoding="utf-8")
    template = Template.from_jinja(text) if isinstance(text, str) else None
    if text and not template:
        print(f"note: {folder} has a chat template of another program, which is not read", file=sys.stderr)
    return template
