"""From rows to documents, piece by piece: texts, examples with prompts and replies, conversations."""

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from gpt.errors import InputError
from gpt.text.template import Part, Template
from gpt.text.tokenizer import split_at_words, whole_characters

LONGEST_PIECE = 1 << 20  # characters
Document = list[Part]  # a text in one part, or an example in several; one that is left out has no text
MESSAGES = "messages"
_EXAMPLES = [MESSAGES], ["prompt", "completion"]


class Piece(NamedTuple):
    """A document or a part of one."""

    text: str
    first: bool = True  # a document begins with it
    scored: bool = True  # a model learns to write it; of an example, the first piece is not
    split: str = ""  # `train` or `val`, see `gpt.data.split`


def cut(documents: Iterable[Document]) -> Iterator[Piece]:
    """Documents cut into pieces."""
    for document in documents:
        first = True
        for text, scored in document:
            for part in split_at_words(whole_characters(text), LONGEST_PIECE):
                yield Piece(part, first, scored)
                first = False


def join(rows: Iterable[Document], starts: str) -> Iterator[Document]:
    """Documents from rows of text: one that matches the expression `starts` begins a document."""
    texts: list[str] = []
    for row in rows:
        if not row[0].scored:
            raise InputError("holds examples: document_starts joins rows of text")
        if texts and re.match(starts, row[0].text):
            yield [Part("".join(texts), True)]
            texts = []
        texts.append(row[0].text)
    if texts:
        yield [Part("".join(texts), True)]


def read_documents(tables: Iterable[Any], column: str, template: Template) -> Iterator[Document]:
    """The documents in rows: dictionaries, of which the first decides on the columns, or tables of Arrow."""
    names: list[str] = []
    number = 0
    for table in tables:
        single = isinstance(table, dict)
        names = names or _choose_columns(column, list(table) if single else table.schema.names)
        for row in [table] if single else table.select(names).to_pylist():
            number += 1
            try:
                yield _read_row({name: row.get(name) for name in names}, template)
            except InputError as error:
                raise InputError(f"in row {number}: {error}") from None


def _choose_columns(column: str, present: list[str]) -> list[str]:
    """The columns to read: texts, messages, or prompts and completions. `text` may stand for examples."""
    wanted = [column] if column in present else [part.strip() for part in column.split(",")]
    if wanted == ["text"]:
        wanted = next((names for names in _EXAMPLES if {*names} <= {*present}), wanted)
    if len(wanted) > 2 or not {*wanted} <= {*present}:
        raise InputError(
            f"has no column {column!r}, it has {', '.join(present)}: choose one with --text_column, "
            "or PROMPT,COMPLETION (gpt fit: --data.text_column)"
        )
    return wanted


def _read_row(row: dict[str, Any], template: Template) -> Document:
    """The document of a row's columns: a missing text or completion is empty."""
    (name, messages), *others = row.items()
    if others:
        pair = zip(("user", "assistant"), row.values(), strict=True)
        messages = [{"role": role, "content": "" if text is None else text} for role, text in pair]
    elif name != MESSAGES and not isinstance(messages, list):
        if not isinstance(messages, str | None):
            raise InputError(f"column {name!r} holds {type(messages).__name__}, expected text")
        return [Part(messages or "", True)]
    elif isinstance(messages, str):
        try:
            messages = json.loads(messages)
        except ValueError as error:
            raise InputError(f"its messages are not JSON: {error}") from None
    *parts, (rest, _) = template.parts(messages)
    if rest or messages[-1]["role"] != "assistant":
        raise InputError(f"its last message is the {messages[-1]['role']}'s, expected the assistant's")
    return parts if all(text.strip() for text, scored in parts if scored) else [Part("", False)]
