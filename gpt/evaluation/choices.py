"""`gpt evaluate --choices`: classify by likelihood. The labels are the completions of the examples.

Shapes: R prompts, C choices, B sequences in a batch, T tokens in a sequence.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from gpt.data.prepared import Prepared
from gpt.data.split import SPLITS
from gpt.data.stored import is_scored, token_ids
from gpt.data.windows import IGNORE_INDEX
from gpt.errors import InputError
from gpt.evaluation.scoring import score
from gpt.model import GPT
from gpt.plain import JsonObject
from gpt.progress import notice, progress

_MOST_LABELS = 1000
_SEQUENCES = 16  # sequences in a batch


class Example(NamedTuple):
    """The token ids of an example, as training reads them."""

    prompt: tuple[int, ...]
    """`<|endoftext|>` and the text before the label."""
    label: tuple[int, ...]
    """The last completion that is scored, and the `<|endoftext|>` that ends it."""


def score_choices(model: GPT, prepared: Prepared, split: str) -> JsonObject:
    """Return how often the likeliest choice is the label of an example in a split, and counts of each label.

    The choices are the different labels of both splits. The score of a choice is the log-probability of its
    tokens and of the `<|endoftext|>` that ends it. The model has to be in evaluation mode. Raises InputError
    for plain text, for a split without examples, for an example without a label, and for one label only, too
    many labels or too long ones.
    """
    if prepared.template is None:
        raise InputError("expected examples with a prompt and a label as its completion, got plain text")
    examples = list(read_examples(prepared, split))
    if not examples:
        raise InputError(f"the split {split} has no examples")
    labels = Counter(example.label for part in SPLITS for example in read_examples(prepared, part))
    if not 2 <= len(labels) <= _MOST_LABELS:
        raise InputError(
            f"expected 2 to {_MOST_LABELS:,} different labels as completions, got {len(labels):,}"
        )
    choices = [label for label, _ in labels.most_common()]
    likeliest = log_probabilities(model, [example.prompt for example in examples], choices).argmax(axis=1)
    pairs = Counter((example.label, choices[k]) for example, k in zip(examples, likeliest, strict=True))
    given = Counter(example.label for example in examples)
    accuracy = sum(pairs[label, label] for label in choices) / len(examples)
    counts = {
        prepared.tokenizer.decode(label[:-1]): {
            "examples": given[label],
            "predicted": sum(pairs[other, label] for other in choices),
            "right": pairs[label, label],
        }
        for label in choices
    }
    return {
        "examples": len(examples),
        "accuracy": accuracy,
        "standard_error": math.sqrt(accuracy * (1 - accuracy) / len(examples)),
        "accuracy_of_the_most_frequent_label": max(given.values()) / len(examples),
        "labels": counts,
    }


def read_examples(prepared: Prepared, split: str) -> Iterator[Example]:
    """Yield the examples of a split. In a conversation, the last reply that is scored is the label.

    Raises InputError for an example of which nothing is scored.
    """
    stream = prepared.stream(split)
    stored = stream.checked(stream.tokens)
    starts = [] if stream.example_starts is None else stream.example_starts.tolist()
    for start, end in pairwise([*starts, len(stored)]):
        scored = is_scored(stored[start:end])
        if not scored.any():
            raise InputError(f"an example of the split {split} has no label: nothing of it is scored")
        label_end = int(np.flatnonzero(scored).max()) + 1
        label_start = int(np.flatnonzero(~scored[:label_end]).max(initial=-1)) + 1
        ids = token_ids(stored[start : start + label_end]).tolist()
        yield Example((prepared.tokenizer.eot, *ids[:label_start]), tuple(ids[label_start:]))


def log_probabilities(
    model: GPT, prompts: Sequence[tuple[int, ...]], choices: Sequence[tuple[int, ...]]
) -> NDArray[np.float64]:
    """Return the log-probability of each choice after each prompt, (R, C).

    A prompt that does not fit before the longest choice loses its beginning, and a line counts such prompts.
    """
    context_length = model.config.context_length
    longest = context_length + 1 - max(map(len, choices))  # tokens of a prompt; a last token is not read
    if longest < 1:
        raise InputError(f"a label is longer than the model's context_length of {context_length} tokens")
    if cut := sum(len(prompt) > longest for prompt in prompts):
        notice(f"prompts longer than {longest} tokens lose their beginning, {cut:,} of {len(prompts):,}")
    pairs = [(prompt[-longest:], choice) for prompt in prompts for choice in choices]
    scores = []
    with progress("scoring choices", len(pairs), unit="choices") as advance:
        for first in range(0, len(pairs), _SEQUENCES):
            batch = pairs[first : first + _SEQUENCES]
            length = max(len(prompt) + len(choice) for prompt, choice in batch) - 1
            tokens = torch.zeros(len(batch), length, dtype=torch.int64)  # (B, T)
            targets = torch.full_like(tokens, IGNORE_INDEX)
            for row, (prompt, choice) in enumerate(batch):
                end = len(prompt) + len(choice) - 1
                tokens[row, :end] = torch.tensor(prompt + choice[:-1])
                targets[row, len(prompt) - 1 : end] = torch.tensor(choice)
            scores.append(-score(model, tokens, targets).sum(dim=1).numpy())
            advance(len(batch))
    return np.concatenate(scores).reshape(len(prompts), len(choices))
