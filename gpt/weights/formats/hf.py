"""GPT-2 as transformers stores it: config.json, GPT2LMHeadModel's state dict, the tokenizer's files."""

from dataclasses import asdict
from pathlib import Path

import torch

from gpt.config import GPTConfig
from gpt.errors import InputError
from gpt.files import write_json
from gpt.plain import JsonObject, build, shown
from gpt.text.table import END_OF_TEXT, read_table, to_json
from gpt.text.template import Template
from gpt.text.tokenizer import Tokenizer
from gpt.weights.formats.table import HEADS, Weights, from_gpt, layer, row, to_gpt
from gpt.weights.tensors import read_json, write_tensors

TABLE = (
    row("transformer.wte.weight", "token_embedding.weight"),
    row("transformer.wpe.weight", "position_embedding.weight"),
    *layer("transformer.h.{}.ln_1", "blocks.{}.attention_norm"),
    *layer(
        "transformer.h.{}.attn.c_attn",
        "blocks.{}.attention.W_query",
        "blocks.{}.attention.W_key",
        "blocks.{}.attention.W_value",
        transposed=True,
    ),
    *layer("transformer.h.{}.attn.c_proj", "blocks.{}.attention.out_proj", transposed=True),
    *layer("transformer.h.{}.ln_2", "blocks.{}.feed_forward_norm"),
    *layer("transformer.h.{}.mlp.c_fc", "blocks.{}.feed_forward.up", transposed=True),
    *layer("transformer.h.{}.mlp.c_proj", "blocks.{}.feed_forward.down", transposed=True),
    *layer("transformer.ln_f", "final_norm"),
    row("lm_head.weight", "head.weight"),
)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt")
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
    _check_fixed(values, {"model_type": "gpt2", "activation_function": "gelu" if exact else "gelu_new"})
    config = GPTConfig(  # sizes default to GPT-2 small's in both programs
        **{ours: values[theirs] for theirs, ours in SIZES.items() if theirs in values},
        dropout=values.get("resid_pdrop", 0.1),
        tie_embeddings=values.get("tie_word_embeddings", True),
        exact_gelu=exact,
    )
    _check_fixed(values, {"n_inner": 4 * config.emb_dim, **_FIXED})
    if "wte.weight" in state:  # a GPT2Model's
        head = "lm_head.weight"  # one may stand beside it
        state = {name if name == head else f"transformer.{name}": tensor for name, tensor in state.items()}
    return config, to_gpt(config, state, TABLE)


def _check_fixed(values: JsonObject, fixed: JsonObject) -> None:
    """Raise InputError for a setting with another value than the only one that this GPT supports."""
    for name, expected in fixed.items():
        value = values.get(name)
        if value is not None and value != expected:
            raise InputError(f"{name} is {shown(value)} in config.json, expected {expected!r}")


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


def tokenizer_file(folder: Path) -> Path | None:
    """Return the file of the tokens in a folder: `tokenizer.json`, or `vocab.json` with `merges.txt`."""
    if (folder / "tokenizer.json").is_file():
        return folder / "tokenizer.json"
    has_both = all((folder / name).is_file() for name in ("vocab.json", "merges.txt"))
    return folder / "vocab.json" if has_both else None


def with_tokens(weights: Weights, file: Path) -> tuple[Weights, Tokenizer]:
    """Return the tokenizer in a file, and weights in which `<|endoftext|>` has its last id.

    Where the file has other tokens before it, its row and theirs change places. Raises InputError for a file
    that cannot be used, or an id without a row.
    """
    stored = read_table(file)
    tokenizer = Tokenizer.from_tokens(stored.tokens)
    if stored.end_of_text == tokenizer.eot:
        return weights, tokenizer
    count = len(weights["token_embedding.weight"])
    if not tokenizer.eot < stored.end_of_text < count:
        what = f"the end of a text has the id {stored.end_of_text}"
        raise InputError(f"{what}, but the weights have {count} rows and {tokenizer.eot} ordinary tokens")
    rows = torch.arange(count)
    rows[[tokenizer.eot, stored.end_of_text]] = rows[[stored.end_of_text, tokenizer.eot]]
    moved = {name: weights[name][rows] for name in HEADS if name in weights}
    return weights | moved, tokenizer
