"""`gpt evaluate`: score a model on a text."""

import json
import math
from dataclasses import replace
from typing import Literal

from gpt.data.options import Reading
from gpt.data.prepare import check_reading, prepare_named, prepare_text
from gpt.data.prepared import Prepared, is_prepared
from gpt.data.split import Divided, divide_corpus
from gpt.errors import InputError
from gpt.evaluation.choices import score_choices
from gpt.evaluation.scoring import SAMPLE, bits_per_byte, score_windows
from gpt.model import GPT
from gpt.plain import JsonObject, as_dict
from gpt.progress import progress
from gpt.text.template import DEFAULT_TEMPLATE
from gpt.weights.load import Device, choose_device, load_with_template, read_weights
from gpt.weights.rounding import WeightPrecision, in_precision


def evaluate(
    checkpoint: str | None = None,
    data: str | None = None,
    split: Literal["train", "val"] | None = None,
    val_fraction: float | None = None,
    most_bytes: int | None = None,
    text_column: str | None = None,
    skip_bad_rows: int | None = None,
    choices: bool = False,
    precision: WeightPrecision | None = None,
    device: Device = "auto",
) -> None:
    """Score a model on a text: print nats per token, perplexity and bits per byte as JSON.

    With --choices, print how often the likeliest label is the right one.

    Args:
        checkpoint: a run, a checkpoint, an exported or imported folder, gpt2 or OWNER/NAME on the hub; by
            default the newest run.
        data: a text file, a folder, a pattern, a URL, a corpus file (.yaml), a prepared folder, a name of
            `data/`, or OWNER/NAME on the hub.
        split: train or val. A prepared folder has both, and val is the default. Any other text is scored
            whole by default; with a split, only the part that gpt fit would train on or hold out.
        val_fraction: as in gpt fit, for a text that is not prepared, if split is given.
        most_bytes: as in gpt fit, for a text that is not prepared: score parts spread over a longer text.
        text_column: as in gpt prepare.
        skip_bad_rows: as in gpt prepare.
        choices: take the completions of examples for labels, and choose the likeliest one for each prompt.
        precision: the precision of the weights, by default the model's own, as in gpt generate.
        device: where the model runs; auto takes a GPU if there is one.
    """
    if data is None:
        raise InputError(
            "give what to score with --data: a text file, a folder, a name of `data/` or prepared data"
        )
    if split is None and val_fraction is not None:
        raise InputError("--val_fraction divides the text: give --split train or --split val too")
    reading = Reading(
        val_fraction=val_fraction,
        most_bytes=most_bytes,
        text_column=text_column,
        skip_bad_rows=skip_bad_rows,
    )
    check_reading(data, reading)
    model, tokenizer, template = load_with_template(checkpoint, device)
    reading = replace(reading, template=template or DEFAULT_TEMPLATE)
    if split is None and is_prepared(data):
        split = "val"
    if split is None:  # score the entire text, which is stored as `train`
        reading = replace(reading, val_fraction=0.0)
    prepared = prepare_named(data, tokenizer, reading)
    if template and prepared.template and prepared.template != as_dict(template):
        what = "was prepared with another template than the checkpoint's"
        raise InputError(f"{prepared.folder} {what}: give the text itself")
    scored = in_precision(model, precision)
    part = split or "train"
    score = score_choices(scored, prepared, part) if choices else score_text(scored, prepared, part, data)
    print(json.dumps({"data": data, "split": split or "all", **score}, indent=2))


def score_text(model: GPT, prepared: Prepared, split: str, data: str) -> JsonObject:
    """Return nats per token, perplexity, bits per byte of UTF-8 text, and the standard error of the last.

    Each token of a split is scored once. Bits per byte can be compared between tokenizers. `data` names the
    text to the user.

    `<|endoftext|>` precedes the first token. It also ends each document, where it is scored as a token of no
    bytes. In examples, only the completions count, not the prompts or the template's text. Raises InputError
    for a split without text.
    """
    counts = prepared.counts[split]
    if not counts.scored_bytes:  # only `<|endoftext|>`, which has no bytes
        raise InputError(f"{data} has no text to score in its split {split}")
    with progress(f"scoring {data}", counts.scored_bytes) as advance:
        nats, sizes = score_windows(model, prepared, split, advance=advance)
    per_token = float(nats.sum()) / counts.scored_tokens
    bits, error = bits_per_byte(nats, sizes)
    return {
        "tokens": counts.scored_tokens,
        "bytes": counts.scored_bytes,
        "nats_per_token": per_token,
        "perplexity": math.exp(min(per_token, 700.0)),
        "bits_per_byte": bits,
        "standard_error": error if math.isfinite(error) else None,
    }


def score_sample(
    weights: str, text: Divided | Prepared, most_context: int, device: Device
) -> tuple[float, float]:
    """Return bits per byte of about `SAMPLE` tokens, spread over the held-out text, and their standard error.

    `weights` are a path or name for `find`. They have at most `most_context` positions and run on `device`.
    Their own template is put around the messages of examples.
    """
    stored = read_weights(weights).cropped()
    stored = stored.with_positions(min(most_context, stored.config.context_length))
    model = stored.build().to(choose_device(device))
    if isinstance(text, Divided) and stored.template and stored.template != text.source.template:
        source = replace(text.source, template=stored.template)
        text = divide_corpus(source, text.val_fraction, text.most_bytes)
    prepared = prepare_text(text, stored.tokenizer)
    return bits_per_byte(*score_windows(model, prepared, "val", SAMPLE))
