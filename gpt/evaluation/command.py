"""`gpt evaluate`: score a model on a text, on last words (LAMBADA), or on endings (HellaSwag)."""

import json as json_format
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gpt.data.prepare import prepare_for
from gpt.data.shards import META, Prepared
from gpt.errors import InputError, check_least
from gpt.evaluation.scoring import answer, bits_per_byte, score_windows
from gpt.files import check_free, write_json
from gpt.model import GPT
from gpt.progress import progress
from gpt.text.template import Template
from gpt.text.tokenizer import Tokenizer
from gpt.weights.load import Device, load_with_template


def evaluate(
    checkpoint: str | None = None,
    data: str | None = None,
    task: Literal["text", "lambada", "hellaswag"] = "text",
    split: Literal["train", "val"] | None = None,
    val_fraction: float | None = None,
    most_bytes: int | None = None,
    stride: int | None = None,
    batch_size: int = 8,
    json: Path | None = None,
    device: Device = "auto",
    overwrite: bool = False,
) -> None:
    """Score a model and print the result as JSON.

    text: nats per token, perplexity and bits per byte, every token counted once. lambada: how often greedy
    decoding writes the last word, on JSON lines of {"text": ...}. hellaswag: how often the right ending is
    the most likely, on JSON lines of {"ctx": ..., "endings": [...], "label": 0}.

    Args:
        checkpoint: a checkpoint, a run, or what gpt import reads; the newest run by default.
        data: a text file, a folder, a recipe's name or a prepared folder; for the other tasks a file of JSON
            lines.
        task: text, lambada or hellaswag.
        split: train or val: of a prepared folder, val by default; of other text, the part that gpt fit would
            train on or hold out, by default the entire text.
        val_fraction: of other text, as in gpt fit, if split is given.
        most_bytes: of other text, as in gpt fit: parts of all of a longer text are scored.
        stride: tokens by which the window moves; fewer than the context length give each token more context,
            as perplexities are usually reported, and take longer. By default windows do not overlap.
        batch_size: windows at once; it affects only the speed.
        json: a file to write the result to as well.
        device: where the model runs; auto takes a GPU if there is one.
        overwrite: replace an existing JSON file.
    """
    if data is None:
        raise InputError("give what to score with --data: a text file, a folder, a recipe or prepared data")
    check_least(1, batch_size=batch_size)
    if json is not None:
        check_free(json, overwrite)
    model, tokenizer, template = load_with_template(checkpoint, device)
    if task == "text":
        options: dict[str, Any] = {"stride": stride, "batch_size": batch_size, "template": template}
        found = score_text(model, tokenizer, data, split, val_fraction, most_bytes, **options)
    else:
        score = {"lambada": score_last_words, "hellaswag": score_endings}[task]
        found = score(model, tokenizer, Path(data), batch_size)
    result = {"task": task, "data": data, **found}
    print(json_format.dumps(result, indent=2))
    if json is not None:
        write_json(json, result)


def score_text(
    model: GPT,
    tokenizer: Tokenizer,
    data: str,
    split: str | None = None,
    val_fraction: float | None = None,
    most_bytes: int | None = None,
    stride: int | None = None,
    batch_size: int = 8,
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
    stream, (tokens, size) = prepared.stream(part), prepared.scored(part)
    if not size:  # of `<|endoftext|>` alone no bits per byte can be computed
        raise InputError(f"{data} has no text to score in its split {part}")
    starts = prepared.document_starts(part) if prepared.template else None
    options: dict[str, Any] = {"stride": stride, "batch_size": batch_size, "document_starts": starts}
    found = []
    with progress(f"scoring {data}", size) as advance:
        for one in score_windows(model, stream, tokenizer.byte_lengths(), **options):
            found.append(one)
            advance(int(one[1].sum()))
    nats, sizes = map(np.concatenate, zip(*found, strict=True))
    per_token = float(nats.sum()) / tokens
    bits, error = bits_per_byte(nats, sizes)
    return {
        "split": split or "all",
        "tokens": tokens,
        "bytes": size,
        "nats_per_token": per_token,
        "perplexity": math.exp(min(per_token, 700.0)),
        "bits_per_byte": bits,
        "standard_error": error if math.isfinite(error) else None,
    }


def score_last_words(model: GPT, tokenizer: Tokenizer, path: Path, batch_size: int = 8) -> dict[str, Any]:
    """LAMBADA's accuracy of greedy decoding and perplexity of the last word (Paperno et al. 2016)."""
    questions = []
    for where, line in _lines(path, "text"):
        before, blank, word = str(line["text"]).rstrip().rpartition(" ")
        if not blank or not before:
            raise InputError(f"{where}: the text has no last word after others")
        questions.append((tokenizer.encode(before), tokenizer.encode(f" {word}")))
    nats, correct = zip(*answer(model, tokenizer.eot, questions, batch_size, f"scoring {path}"), strict=True)
    perplexity = math.exp(min(float(np.mean(nats)), 700.0))
    return {"examples": len(nats), "accuracy": float(np.mean(correct)), "perplexity": perplexity}


def score_endings(model: GPT, tokenizer: Tokenizer, path: Path, batch_size: int = 8) -> dict[str, Any]:
    """HellaSwag's accuracy (Zellers et al. 2019): the ending of the highest probability is chosen.

    `accuracy_per_character` divides the log-probabilities by the endings' lengths, like acc_norm of
    lm-evaluation-harness.
    """
    questions, examples = [], []
    for where, line in _lines(path, "ctx", "endings", "label"):
        endings, label = line["endings"], str(line["label"])
        if not isinstance(endings, list) or label not in map(str, range(len(endings))):
            raise InputError(f"{where}: the label {label} is not the index of an ending")
        examples.append((int(label), [max(1, len(str(ending))) for ending in endings]))
        context = tokenizer.encode(str(line["ctx"]).rstrip())
        questions += [(context, tokenizer.encode(f" {ending}")) for ending in endings]
    answers = answer(model, tokenizer.eot, questions, batch_size, f"scoring {path}")
    right = []  # in total, and per character
    for expected, sizes in examples:
        nats = np.array([next(answers)[0] for _ in sizes])
        right.append([nats.argmin() == expected, (nats / sizes).argmin() == expected])
    accuracy, per_character = np.mean(right, axis=0).tolist()
    return {"examples": len(examples), "accuracy": accuracy, "accuracy_per_character": per_character}


def _lines(path: Path, *keys: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The place and the object of each JSON line that is not blank."""
    lines = [(number, text) for number, text in enumerate(path.read_bytes().splitlines(), 1) if text.strip()]
    if not lines:
        raise InputError(f"{path} has no lines to score")
    for number, text in lines:
        try:
            line = json_format.loads(text)
        except (ValueError, RecursionError):
            line = None
        if not isinstance(line, dict) or not line.keys() >= {*keys}:
            raise InputError(f"{path}, line {number}: expected a JSON object with {', '.join(keys)}")
        yield f"{path}, line {number}", line
