"""Rows that are examples to tune on: a prompt and its completion, or the messages of a conversation."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from gpt.data.shards import SPLITS, Prepared
from gpt.errors import InputError
from gpt.progress import notice
from gpt.template import Part, Template

MESSAGES = "messages"
_EXAMPLES = (MESSAGES,), ("prompt", "completion")


def choose_columns(column: str, present: list[str], name: str) -> tuple[str, ...]:
    """The columns to read: one of texts or messages, or two, of prompts and completions.

    Where there is no `text`, the default, columns of examples are. An InputError if any is missing.
    """
    wanted = (column,) if column in present else tuple(column.split(","))
    if wanted == ("text",):
        wanted = next((names for names in _EXAMPLES if {*names} <= {*present}), wanted)
    if len(wanted) > 2 or not {*wanted} <= {*present}:
        raise InputError(
            f"{name} has no column {column!r}, it has {', '.join(present)}: choose one with --text_column, "
            "or PROMPT,COMPLETION (gpt fit: --data.text_column)"
        )
    return wanted


def read_example(values: Sequence[Any], template: Template) -> list[Part]:
    """The text of a row in parts; none where a completion is empty. An InputError says what is wrong."""
    messages = values[0]
    if len(values) == 2:
        pair = zip(("user", "assistant"), values, strict=True)
        messages = [{"role": role, "content": "" if text is None else text} for role, text in pair]
    elif isinstance(messages, str):
        try:
            messages = json.loads(messages)
        except ValueError as error:
            raise InputError(f"its messages are not JSON: {error}") from None
    *parts, (rest, _) = template.parts(messages)
    if rest or messages[-1]["role"] != "assistant":
        raise InputError(f"its last message is the {messages[-1]['role']}'s, expected the assistant's")
    return parts if all(text.strip() for text, scored in parts if scored) else []


def check_examples(prepared: Prepared, context_length: int, isolate: bool) -> None:
    """Warn of examples that no window holds; an InputError if `isolate` would cut others."""
    if prepared.template is None:
        return
    lengths = np.concatenate([prepared.document_lengths(split) for split in SPLITS])
    replies = sum(int((part == prepared.tokenizer.eot).sum()) for part in prepared.stream("train").parts)
    if isolate and replies > prepared.count("train", "documents"):
        raise InputError("isolate would separate the turns of a conversation: leave it out")
    if long := int((lengths > context_length).sum()):
        notice(
            f"{long:,} of {len(lengths):,} examples are longer than the context_length of {context_length}: "
            f"they are cut, so a completion may lack its prompt; the longest has {lengths.max():,} tokens"
        )
