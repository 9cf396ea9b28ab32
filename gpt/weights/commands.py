"""`gpt import` and `gpt export`: read other programs' weights, and write a model for other programs."""

import sys
from pathlib import Path
from typing import Literal

from gpt.config import GPTConfig
from gpt.errors import InputError
from gpt.files import check_free
from gpt.template import Template
from gpt.tokenizer import Tokenizer
from gpt.weights.formats import book, gguf, hf, nanogpt
from gpt.weights.formats.table import Weights
from gpt.weights.load import GPT, Found, read_weights

ExportFormat = Literal["hf", "nanogpt", "book", "gguf"]
_WRITERS = {"hf": hf.write, "nanogpt": nanogpt.write, "book": book.write}
_EXACT_GELU = {"nanogpt": True, "book": False, "gguf": False}  # what the program always computes


def import_weights(
    source: str,
    output: Path = Path("imported"),
    format: Literal["hf", "nanogpt", "book"] | None = None,
    num_heads: int | None = None,
) -> None:
    """Turn another program's GPT-2 weights into a folder that every command here takes as --checkpoint.

    Args:
        source: a Hugging Face folder or hub name (gpt2, hub:OWNER/NAME), a nanoGPT checkpoint, or a
            state dict of the book's GPTModel.
        output: the folder to write, new or empty.
        format: the expected format; any by default.
        num_heads: for a state dict of the book whose shape is none of GPT-2's sizes.
    """
    check_free(output)
    found = read_weights(source, num_heads)
    if format is not None and found.format != format:
        raise InputError(f"{source} is in the format {found.format}, expected {format}")
    found = found.cropped()
    model = GPT.from_weights(found.config, found.weights)
    model.save_pretrained(output)
    if found.own_tokenizer or found.template:
        hf.write_tokenizer(found.tokenizer, output, model.config.context_length, found.template)
    print(f"{output}/ holds {model.num_parameters():,} weights, read from the format {found.format}")
    print(f"next: gpt generate --checkpoint {output} --prompt 'The '")
    print(f"or:   gpt fit --model.init_from {output} --data.corpus my.txt")


def export_weights(
    checkpoint: str | None = None, output: Path = Path("exported"), format: ExportFormat = "hf"
) -> None:
    """Write a model so that another program loads it unchanged.

    hf: a folder for transformers, with the tokenizer. nanogpt: ckpt.pt, which its sample.py reads. book:
    model.pth and config.json, the state dict and the configuration of the book's GPTModel. gguf: model.gguf
    for llama.cpp, with the tokenizer.

    Args:
        checkpoint: a .ckpt file, a run folder or an imported folder; the newest run by default.
        output: the folder to write, new or empty.
        format: hf, nanogpt, book or gguf.
    """
    check_free(output)
    found = read_weights(checkpoint)
    write_export(found.config, found.weights, output, format, found.own_tokenizer, found.template)
    print(f"{output}/ holds the model in the format {format}")


def write_export(
    config: GPTConfig,
    weights: Weights,
    folder: Path,
    format: ExportFormat,
    own: Tokenizer | None = None,
    template: Template | None = None,
) -> None:
    """Write a GPT's state dict in another format, without token rows past the tokenizer's.

    `own` is the tokenizer, if it is not GPT-2's, `template` that of a chat; nanogpt and book get the
    tokenizer's files beside the weights where there is one of the two.
    """
    found = Found("gpt", config, weights, own).cropped()
    config, weights = found.config, found.weights
    if _EXACT_GELU.get(format, config.exact_gelu) != config.exact_gelu:
        names = {True: "the exact GELU", False: "GELU's tanh approximation"}
        here, there = names[config.exact_gelu], names[not config.exact_gelu]
        print(f"note: {format} computes {there}, this model {here}: logits differ slightly", file=sys.stderr)
    if format == "gguf":
        gguf.write(config, weights, folder, found.tokenizer, template)
        return
    if own or template or format == "hf":
        hf.write_tokenizer(found.tokenizer, folder, config.context_length, template)
    _WRITERS[format](config, weights, folder)
