"""`gpt import` and `gpt export`: read other programs' weights, and write weights for other programs."""

import html
import re
import sys
from pathlib import Path
from typing import Literal

from gpt.errors import InputError
from gpt.files import atomic_write, check_free, readable
from gpt.text.tokenizer import SMALLEST_SIZE
from gpt.weights.checkpoint import RunPart
from gpt.weights.figures import figures_of
from gpt.weights.formats import book, gguf, hf, nanogpt
from gpt.weights.load import StoredModel, read_weights

FolderFormat = Literal["hf", "nanogpt", "book", "gguf"]
_WRITERS = {"hf": hf.write, "nanogpt": nanogpt.write, "book": book.write}
_MOST_CELL = 200  # characters of a table's cell
_CARD = """---
library_name: transformers
pipeline_tag: text-generation
# license: choose one
---

# {}

A GPT-2, trained and exported by minimal-gpt.

| | |
| --- | --- |
"""


def import_weights(
    source: str,
    output: Path = Path("imported"),
    format: Literal["hf", "nanogpt", "book"] | None = None,
) -> None:
    """Turn another program's GPT-2 weights into a folder that every command takes as --checkpoint.

    Args:
        source: a Hugging Face folder or hub name (gpt2, OWNER/NAME), a nanoGPT checkpoint, or a
            state dict of the book's GPTModel.
        output: the folder to write, new or empty.
        format: the expected format; any by default.
    """
    check_free(output)
    stored = read_weights(source)
    if format is not None and stored.format != format:
        raise InputError(f"{source} is in the format {stored.format}, expected {format}")
    stored = stored.cropped()
    model = stored.build()
    model.save_pretrained(output)
    if stored.own_tokenizer:
        hf.write_tokenizer(stored.tokenizer, output, model.config.context_length, stored.template)
    print(f"{output}/ holds {model.num_parameters():,} weights, read from the format {stored.format}")
    if not stored.own_tokenizer and stored.config.vocab_size < SMALLEST_SIZE:
        print("it has no tokenizer: nanoGPT keeps the alphabet of characters in a pickle, which is not read.")
        print("Only Python can use it, and it continues token numbers:")
        print(f"gpt.generate(GPT.from_pretrained({str(output)!r}), [[0]], max_new_tokens=20)")
    else:
        print(f"next: gpt generate --checkpoint {output} --prompt 'The'")
        print(f"or:   gpt fit --model.init_from {output} --data.corpus my.txt")


def export_folder(
    stored: StoredModel, output: Path, format: FolderFormat, push: str | None, run: RunPart | None
) -> None:
    """Export weights to a folder, and upload it to the hub under the name `push`, if given.

    `run` is the state of the run in the checkpoint, if it has one, for the model card.
    """
    write_export(stored, output, format)
    if format == "hf":
        with atomic_write(output / "README.md") as file:
            file.write(_card(stored, push or output.name, run))
    print(f"{output}/ holds the model in the format {format}")
    if push is not None:
        from huggingface_hub import create_repo, upload_folder

        create_repo(push, exist_ok=True)
        print(upload_folder(repo_id=push, folder_path=output))


def _card(stored: StoredModel, name: str, run: RunPart | None) -> str:
    """Return a model's README.md for the hub: its shape, and the figures that its checkpoint knows."""
    figures = figures_of(stored.num_parameters(), run)
    facts = stored.config.to_dict() | {key: value for key, value in figures.items() if value is not None}
    rows = "".join(f"| {key} | {_cell(value)} |\n" for key, value in facts.items())
    return readable(_CARD.format(name) + rows)  # names of folders and texts may not be UTF-8


def _cell(value: object) -> str:
    """Return a value for a table in Markdown; text is untrusted, so it is escaped."""
    text = " ".join(str(value).split())
    if len(text) > _MOST_CELL:
        text = f"{text[:_MOST_CELL]}..."
    # Escape HTML, Markdown such as cell borders, and addresses that would become links.
    return re.sub(r"[\\`*_{}\[\]()#!|~$:@^]|(?<=www)\.", r"\\\g<0>", html.escape(text, quote=False))


def write_export(stored: StoredModel, folder: Path, format: FolderFormat) -> None:
    """Write weights in another format, with the tokenizer's files if the weights have their own.

    Raises InputError, before anything is written, if the format needs a tokenizer and there is none.
    """
    stored = stored.cropped()
    needs_tokenizer = stored.own_tokenizer or format in ("hf", "gguf")
    tokenizer = stored.tokenizer if needs_tokenizer else None
    if format != "hf" and stored.config.exact_gelu != (format == "nanogpt"):
        what = "nanoGPT computes the exact GELU; book and gguf use GPT-2's approximation"
        print(f"note: {what}: logits differ slightly from this model's", file=sys.stderr)
    if format == "gguf":
        return gguf.write(stored.config, stored.weights, folder, stored.tokenizer, stored.template)
    _WRITERS[format](stored.config, stored.weights, folder)
    if tokenizer:
        hf.write_tokenizer(tokenizer, folder, stored.config.context_length, stored.template)
