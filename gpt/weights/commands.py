"""`gpt import` and `gpt export`: weights of other programs in, and a model of one's own out."""

import sys
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save

from gpt.config import GPTConfig
from gpt.errors import InputError
from gpt.files import atomic_write, write_json
from gpt.tokenizer import Tokenizer
from gpt.weights import book, hf, nanogpt
from gpt.weights.load import find
from gpt.weights.pretrained import GPT
from gpt.weights.read import read_weights
from gpt.weights.table import Weights, crop
from gpt.weights.tokenizer_files import write_tokenizer

ExportForm = Literal["hf", "nanogpt", "book"]


def import_weights(
    source: str,
    output: Path = Path("imported"),
    format: ExportForm | None = None,
    num_heads: int | None = None,
) -> None:
    """Turn GPT-2 weights of another program into a folder that every command here takes as --checkpoint.

    Args:
        source: a Hugging Face folder or hub name (gpt2, hub:OWNER/NAME), a nanoGPT checkpoint, or a
            state dict of the book's GPTModel.
        output: the folder to write; it must not be there yet, or be empty.
        format: the form that is expected; by default whichever it is.
        num_heads: for a state dict of the book that is not of one of GPT-2's sizes.

    Raises:
        InputError: there is nothing of these forms, a tensor does not fit, or the folder is taken.
    """
    _check_free(output)
    found = read_weights(source, num_heads)
    if format is not None and found.form != format:
        raise InputError(f"{source} is of the form {found.form}, expected {format}")
    model = GPT.from_weights(*crop(found.config, found.weights, vocab_size=Tokenizer().n_vocab))
    model.save_pretrained(output)
    print(f"{output}/ holds {model.num_parameters():,} weights, read from the form {found.form}")
    print(f"next: gpt generate --checkpoint {output} --prompt 'The '")
    print(f"or:   gpt fit --model.init_from {output} --data.corpus my.txt")


def export_weights(
    checkpoint: str | None = None, output: Path = Path("exported"), format: ExportForm = "hf"
) -> None:
    """Write a model so that another program loads it unchanged.

    hf: a folder for transformers, with the tokenizer. nanogpt: ckpt.pt, which its sample.py reads. book:
    model.pth and config.json, the state dict and the configuration of the book's GPTModel.

    Args:
        checkpoint: a .ckpt file, a run folder or an imported folder; the newest run if left out.
        output: the folder to write; it must not be there yet, or be empty.
        format: hf, nanogpt or book.

    Raises:
        InputError: there is no such checkpoint, the form cannot hold this model, or the folder is taken.
    """
    _check_free(output)
    found = read_weights(find(checkpoint))
    write_export(found.config, found.weights, output, format)
    print(f"{output}/ holds the model in the form {format}")


def write_export(config: GPTConfig, weights: Weights, folder: Path, form: ExportForm) -> None:
    """Write a GPT's state dict in another form; rows past GPT-2's vocabulary are left out.

    Raises:
        InputError: the form cannot hold this model.
        OSError: the folder cannot be written.
    """
    config, weights = crop(config, weights, vocab_size=Tokenizer().n_vocab)
    if form == "hf":
        tokenizer = Tokenizer("gpt2", vocab_size=config.vocab_size)
        with atomic_write(folder / "model.safetensors", "wb") as file:
            file.write(save(hf.export_weights(config, weights), metadata={"format": "pt"}))
        write_tokenizer(tokenizer, folder, config.context_length)
        write_json(folder / "config.json", hf.write_config(config, tokenizer.eot))
        return
    if config.exact_gelu != (form == "nanogpt"):
        names = {True: "the exact GELU", False: "GELU's tanh approximation"}
        here, there = names[config.exact_gelu], names[not config.exact_gelu]
        print(f"note: {form} computes {there}, this model {here}: logits differ slightly", file=sys.stderr)
    if form == "nanogpt":
        _save(nanogpt.export_checkpoint(config, weights), folder / "ckpt.pt")
    else:
        _save(book.export_weights(config, weights), folder / "model.pth")
        write_json(folder / "config.json", book.write_config(config))


def _save(value: Any, path: Path) -> None:
    with atomic_write(path, "wb") as file:
        torch.save(value, file)


def _check_free(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} is there already: choose another folder with --output")
