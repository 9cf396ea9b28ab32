"""`gpt evaluate`: score a model on a text."""

import json
import math
from typing import Any, Literal

import numpy as np

from gpt.data.prepare import prepare_for
from gpt.data.shards import Prepared, is_prepared
from gpt.errors import InputError
from gpt.evaluation.scoring import SAMPLE, bits_per_byte, score_windows
from gpt.progress import progress
from gpt.text.tokenizer import Tokenizer
from gpt.weights.load import GPT, Device, choose_device, load_with_template, read_weights


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
        model, tokenizer, data, split, val_fraction=val_fraction, most_bytes=most_bytes, template=template
    )
    print(json.dumps({"data": data, **found}, indent=2))


def score_text(
    model: GPT, tokenizer: Tokenizer, data: str, split: str | None = None, **reading: Any
) -> dict[str, Any]:
    """Nats per token, perplexity, and bits per byte of UTF-8 text, with the standard error of the latter.

    `reading` are options of `prepare_for`. Bits per byte do not depend on the tokenizer.

    `<|endoftext|>` precedes the first token. It also ends each document, where it is predicted as a token and
    counts as no byte. Of examples, whose text is around them in a `template`, tokens and bytes of completions
    count. A split without text raises InputError.
    """
    if is_prepared(data):
        split = split or "val"
    elif split is None:  # nothing is held out
        reading["val_fraction"] = 0.0
    part = split or "train"
    prepared = Prepared(prepare_for(tokenizer, data, **reading))
    counts = prepared.counts[part]
    if not counts.scored_bytes:  # of `<|endoftext|>` alone no bits per byte can be computed
        raise InputError(f"{data} has no text to score in its split {part}")
    found = []
    with progress(f"scoring {data}", counts.scored_bytes) as advance:
        for one in score_windows(model, prepared, part):
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


def score_sample(
    weights: str, data: str, most_context: int, device: Device, **reading: Any
) -> tuple[float, float]:
    """Bits per byte of about `SAMPLE` tokens from all that is held out of a text, and their standard error.

    `weights` are those of `find`, with at most so many positions, and compute on the `device`; `reading` are
    options of `prepare_for`.
    """
    found = read_weights(weights)
    found = found.cropped().with_positions(min(most_context, found.config.context_length))
    model = GPT.from_weights(found.config, found.weights).to(choose_device(device))
    prepared = Prepared(prepare_for(found.tokenizer, data, template=found.template, **reading))
    nats, sizes = map(np.concatenate, zip(*score_windows(model, prepared, "val", SAMPLE), strict=True))
    return bits_per_byte(nats, sizes)
