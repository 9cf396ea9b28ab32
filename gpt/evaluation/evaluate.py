"""`gpt evaluate`: score a model on a text."""

import json
import math
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gpt.data.prepare import prepare_for
from gpt.data.shards import META, Prepared
from gpt.errors import InputError
from gpt.evaluation.scoring import bits_per_byte, score_windows
from gpt.model import GPT
from gpt.progress import progress
from gpt.text.template import Template
from gpt.text.tokenizer import Tokenizer
from gpt.weights.load import Device, load_with_template


def evaluate(
    checkpoint: str | None = None,
    data: str | None = None,
    split: Literal["train", "val"] | None = None,
    val_fraction: float | None = None,
    most_bytes: int | None = None,
    device: Device = "auto",
) -> None:
    """Score a model on a text: nats per token, perplexity and bits per byte as JSON, each token once.

    Args:
        checkpoint: a checkpoint, a run, or what gpt import reads; the newest run by default.
        data: a text file, a folder, a recipe's name or a prepared folder.
        split: train or val: of a prepared folder, val by default; of other text, the part that gpt fit would
            train on or hold out, by default the entire text.
        val_fraction: of other text, as in gpt fit, if split is given.
        most_bytes: of other text, as in gpt fit: parts of all of a longer text are scored.
        device: where the model runs; auto takes a GPU if there is one.
    """
    if data is None:
        raise InputError("give what to score with --data: a text file, a folder, a recipe or prepared data")
    model, tokenizer, template = load_with_template(checkpoint, device)
    found = score_text(
        model,
        tokenizer,
        data,
        split,
        val_fraction=val_fraction,
        most_bytes=most_bytes,
        template=template,
    )
    print(json.dumps({"data": data, **found}, indent=2))


def score_text(
    model: GPT,
    tokenizer: Tokenizer,
    data: str,
    split: str | None = None,
    *,
    val_fraction: float | None = None,
    most_bytes: int | None = None,
    template: Template | None = None,
) -> dict[str, Any]:
    """Nats per token, perplexity, and bits per byte of UTF-8 text, with the standard error of the latter.

    Bits per byte do not depend on the tokenizer.

    `<|endoftext|>` precedes the first token. It also ends each document, where it is predicted as a token and
    counts as no byte. Of examples, whose text is around them in `template`, tokens and bytes of completions
    count. A split without text raises InputError.
    """
    split = "val" if split is None and (Path(data) / META).is_file() else split
    part, fraction = (split, val_fraction) if split else ("train", 0.0)  # without a split nothing is held out
    reading: dict[str, Any] = {"val_fraction": fraction, "most_bytes": most_bytes, "template": template}
    prepared = Prepared(prepare_for(tokenizer, data, **reading))
    stream = prepared.stream(part)
    counts = prepared.counts[part]
    if not counts.scored_bytes:  # of `<|endoftext|>` alone no bits per byte can be computed
        raise InputError(f"{data} has no text to score in its split {part}")
    starts = prepared.document_starts(part) if prepared.template else None
    found = []
    with progress(f"scoring {data}", counts.scored_bytes) as advance:
        for one in score_windows(model, stream, tokenizer.byte_lengths(), starts):
            found.append(one)
            advance(int(one[1].sum()))
    nats, sizes = map(np.concatenate, zip(*found, strict=True))
    per_token = float(nats.sum()) / counts.scored_tokens
    bits, error = bits_per_byte(nats, sizes)
    return {
        "split": split or "all",
        "tokens": counts.scored_tokens,
        "bytes": counts.scored_bytes,
        "nats_per_token": per_token,
        "perplexity": math.exp(min(per_token, 700.0)),
        "bits_per_byte": bits,
        "standard_error": error if math.isfinite(error) else None,
    }
