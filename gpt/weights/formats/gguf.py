"""GGUF, llama.cpp's file of weights, configuration and tokenizer, written by the `gguf` package."""

import json
from pathlib import Path

from gpt.config import USUAL_TEMPERATURE, USUAL_TOP_K, GPTConfig
from gpt.errors import missing_extra
from gpt.files import atomic_write
from gpt.text.table import END_OF_TEXT, to_json
from gpt.text.template import PLACE, Template
from gpt.text.tokenizer import Tokenizer
from gpt.weights.formats import nanogpt
from gpt.weights.formats.table import Weights, from_gpt

# Sample as `gpt generate` does; Ollama's defaults penalize repetition and cut off more tokens.
_DRAWN = {
    "temperature": USUAL_TEMPERATURE,
    "top_k": USUAL_TOP_K,
    "top_p": 1.0,
    "min_p": 0.0,
    "repeat_penalty": 1.0,
}


def write(
    config: GPTConfig, weights: Weights, folder: Path, tokenizer: Tokenizer, template: Template | None
) -> None:
    """Write model.gguf in float32, with a tied head left out, and a Modelfile for Ollama beside it.

    Raises InputError without the `gguf` package.
    """
    try:
        import gguf
    except ImportError:
        raise missing_extra("this format", "gguf") from None
    table = to_json(tokenizer.tokens)["model"]
    writer = gguf.GGUFWriter(None, "gpt2")
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(config.emb_dim)
    writer.add_feed_forward_length(4 * config.emb_dim)
    writer.add_head_count(config.num_heads)
    writer.add_layer_norm_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*table["vocab"], END_OF_TEXT])
    writer.add_token_types([gguf.TokenType.NORMAL] * tokenizer.eot + [gguf.TokenType.CONTROL])
    writer.add_token_merges([" ".join(pair) for pair in table["merges"]])
    for add_special in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_pad_token_id):
        add_special(tokenizer.eot)
    writer.add_add_bos_token(False)
    if template:
        writer.add_chat_template(template.to_jinja())
    # From Hugging Face's names, which nanoGPT uses too; both keep matrices as (out, in).
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT2, config.num_layers)
    for name, tensor in from_gpt(config, weights, nanogpt.TABLE).items():
        layer, _, parameter = name.rpartition(".")
        writer.add_tensor(f"{names[layer]}.{parameter}", tensor.float().numpy())
    with atomic_write(folder / "model.gguf", "wb") as file:
        writer.write_header_to_file(Path(file.name))
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    with atomic_write(folder / "Modelfile") as file:
        file.write(modelfile(config, template))


def modelfile(config: GPTConfig, template: Template | None) -> str:
    """Return the Modelfile for `ollama create`: the template, the end of a text, and the sampling."""
    text = to_go(template) if template else "{{ .Prompt }}"
    parameters = {"stop": json.dumps(END_OF_TEXT), "num_ctx": config.context_length, **_DRAWN}
    lines = "".join(f"PARAMETER {name} {value}\n" for name, value in parameters.items())
    return f'FROM ./model.gguf\nTEMPLATE """{text}"""\n{lines}'


def to_go(template: Template) -> str:
    """Return the template in Ollama's language, Go's text/template, with all texts as constants.

    A constant never has three quotes in a row, which would end it in a Modelfile.
    """

    def constant(text: str) -> str:
        return f"{{{{ {json.dumps(text, ensure_ascii=False)} }}}}" if text else ""

    cases = ""
    for role, text in vars(template).items():
        before, after = text.split(PLACE)
        after = END_OF_TEXT if role == "assistant" else after
        word = "else if" if cases else "if"
        cases += f'{{{{ {word} eq .Role "{role}" }}}}{constant(before)}{{{{ .Content }}}}{constant(after)}'
    messages = f"{{{{ range .Messages }}}}{cases}{{{{ end }}}}{{{{ end }}}}"
    return constant(END_OF_TEXT) + messages + constant(template.assistant.removesuffix(PLACE))
