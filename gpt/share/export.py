"""`gpt export`: write a model for other programs, or as a page for people who have no such program."""

import math
import os
from pathlib import Path
from typing import Literal

from gpt.errors import InputError, check_least
from gpt.evaluation.copied import training_text
from gpt.files import check_free
from gpt.share.file import MEGABYTES, PagePrecision, write
from gpt.share.gpt2 import is_gpt2
from gpt.weights.checkpoint import parts_of
from gpt.weights.commands import FolderFormat, export_folder
from gpt.weights.formats import hf
from gpt.weights.formats.table import check_known
from gpt.weights.load import find, read_weights
from gpt.weights.runs import model_name, run_of, snapshots_of


def export_weights(
    checkpoint: str | None = None,
    output: Path | None = None,
    format: Literal[FolderFormat, "html"] = "hf",
    push: str | None = None,
    precision: PagePrecision | None = None,
    snapshot_megabytes: float | None = None,
    with_text: bool = False,
) -> None:
    """Write a model in a form that another program can load, or as one file that any browser can run.

    Args:
        checkpoint: a run, a checkpoint, an exported or imported folder, gpt2 or OWNER/NAME on the hub; by
            default the newest run.
        output: the folder to write, new or empty, by default `exported`; for html the file, by default
            `exported.html`.
        format: hf is for transformers and gguf for llama.cpp, each with the tokenizer. nanogpt is a ckpt.pt
            for nanoGPT's sample.py. book is the state dict and configuration of the book's GPTModel. html is
            a page with the model in it.
        push: OWNER/NAME on the Hugging Face hub, to upload the folder to; log in before with `hf auth login`.
        precision: for html: the precision of the weights in the page, by default int8.
        snapshot_megabytes: for html: the maximum space in the page for snapshots of the run, in MB, by
            default 8. A slider shows them. 0 leaves them out.
        with_text: for html: store the training text too, so that the page marks passages that are copied from
            it.
    """
    check_least(0, snapshot_megabytes=snapshot_megabytes)
    if snapshot_megabytes is not None and not math.isfinite(snapshot_megabytes):
        raise InputError(f"--snapshot_megabytes: expected a finite number, got {snapshot_megabytes}")
    html_only = {
        "precision": precision,
        "snapshot_megabytes": snapshot_megabytes,
        "with_text": with_text or None,
    }
    for option, value in html_only.items():
        if format != "html" and value is not None:
            raise InputError(f"--{option}: expected only with --format html, got {format}; leave it out")
    if output is None:
        output = Path("exported.html" if format == "html" else "exported")
    if format != "html":
        check_free(output)
    elif os.path.lexists(output):  # an empty folder cannot become a file
        raise InputError(f"{output} exists already: choose another name")
    if push is not None and (format != "hf" or push.count("/") != 1):
        raise InputError(f"--push {push}: expected OWNER/NAME of the hub, and --format hf")
    path = find(checkpoint)
    stored = read_weights(path).cropped()
    check_known(stored.config, stored.weights, hf.TABLE)
    if not is_gpt2(stored.build()):
        raise InputError(
            "other programs compute GPT-2 with these weights, not what the edited gpt/ does: "
            "generate and serve here, or undo the edit"
        )
    run = run_of(path.resolve())
    state = parts_of(path)[1] if run else None
    if format != "html":
        return export_folder(stored, output, format, push, state)
    said = write(
        output,
        stored,
        name=model_name(checkpoint, path),
        precision=precision or "int8",
        snapshots=snapshots_of(run) if run else [],
        megabytes=MEGABYTES if snapshot_megabytes is None else snapshot_megabytes,
        text=training_text(run, stored.tokenizer) if with_text else None,
        run=state,
    )
    print(said)
