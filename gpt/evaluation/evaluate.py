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
    """Score a model on a text: print nats per token, perplexity and bits per byte as JSON.

    Args:
        checkpoint: a checkpoint, a run, or what gpt import reads; the newest run by default.
        data: a text file, a folder, a recipe's name or a prepared folder.
        split: train or val. A prepared folder has both, and val is the default. Any other text is scored
            whole by default; with a split, only the part that gpt fit would train on or hold out.
        val_fraction: as in gpt fit, for a text that is not prepared, if split is given.
        most_bytes: as in gpt fit, for a text that is not prepared: score parts spread over a longer text.
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
    """Return nats per token, perplexity, bits per byte of UTF-8 text, and the standard error of the last.

    `reading` are options of `prepare_for`. Bits per byte can be compared between tokenizers. Each token is
    scored once.

    `<|endoftext|>` precedes the first token. It also ends each document, where it is scored as a token of no
    bytes. In examples, only the completions count, not the prompts or the `template`'s text. Raises
    InputError for a split without text.
    """
    if is_prepared(data):
        split = split or "val"
    elif split is None:  # score the entire text
        reading["val_fraction"] = 0.0
    part = split or "train"
    prepared = Prepared(prepare_for(tokenizer, data, **reading))
    counts = prepared.counts[part]
    if not counts.scored_bytes:  # only `<|endoftext|>`, which has no bytes
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
    """Return bits per byte of about `SAMPLE` tokens, spread over the held-out text, and their standard error.

    `weights` are a path or name for `find`. They have at most `most_context` positions and run on `device`.
    `reading` are options of `prepare_for`.
    """
    found = read_weights(weights)
    found = found.cropped().with_positions(min(most_context, found.config.context_length))
    model = GPT.from_weights(found.config, found.weights).to(choose_device(device))
    prepared = Prepared(prepare_for(found.tokenizer, data, template=found.template, **reading))
    nats, sizes = map(np.concatenate, zip(*score_windows(model, prepared, "val", SAMPLE), strict=True))
    return bits_per_byte(nats, sizes)
