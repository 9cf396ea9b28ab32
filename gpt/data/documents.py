"""From rows to documents, piece by piece: texts, examples with prompts and replies, conversations."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from gpt.errors import InputError
from gpt.plain import shown
from gpt.text.template import Part, Template
from gpt.text.tokenizer import split_at_words, whole_characters

LONGEST_PIECE = 1 << 20  # characters
Document = list[Part]  # a text in one part, or an example in several; none of one that is left out
MESSAGES = "messages"
_EXAMPLES = [MESSAGES], ["prompt", "completion"]


class Piece(NamedTuple):
    """A document or a part of one; its text is never empty, but for a prompt's."""

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


def read_documents(rows: Iterable[Any], column: str, template: Template) -> Iterator[Document]:
    """The documents in rows, of which the first decides on the columns."""
    names: list[str] = []
    for number, row in enumerate(rows, start=1):
        try:
            if not isinstance(row, dict):
                raise InputError(f"expected an object, got {shown(row)}")
            names = names or _choose_columns(column, list(row))
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
    """The document of a row's columns; none of one whose text, or one of its completions, is empty."""
    (name, value), *others = row.items()
    if others:
        pair = zip(("user", "assistant"), row.values(), strict=True)
        value = [{"role": role, "content": "" if text is None else text} for role, text in pair]
    elif name != MESSAGES and not isinstance(value, list):
        if not isinstance(value, str | None):
            raise InputError(f"column {name!r} holds {type(value).__name__}, expected text")
        return [Part(value, True)] if value else []
    *parts, (rest, _) = template.parts(value)
    if rest:
        raise InputError(f"its last message is the {value[-1]['role']}'s, expected the assistant's")
    return parts if all(text.strip() for text, scored in parts if scored) else []
