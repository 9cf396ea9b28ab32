"""From rows to documents, piece by piece: texts, examples with prompts and replies, conversations."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gpt.data.formats import Row, place
from gpt.errors import InputError
from gpt.plain import parse_json, shown
from gpt.progress import notice_once
from gpt.text.template import Part, Template
from gpt.text.tokenizer import split_at_words, whole_characters

LONGEST_PIECE = 1 << 20  # characters
Document = list[Part]  # a text in one part, or an example in several; none of one that is left out

_ROLES = {"human": "user", "gpt": "assistant"}  # of ShareGPT


class Piece(NamedTuple):
    """A document or a part of one; its text is never empty, but for a prompt's."""

    text: str
    first: bool = True  # a document begins with it
    scored: bool = True  # a model learns to write it; of an example, the first piece is not
    split: str = ""  # `train` or `val`, see `gpt.data.split`


class Columns(NamedTuple):
    """The columns that a row's document is made of, and what such rows are called.

    One has a text or the messages of a conversation, two a prompt and its completion; of three, the middle
    one has an input that belongs to the prompt, which a row may lack.
    """

    names: tuple[str, ...]
    kind: str = ""

    @property
    def needed(self) -> tuple[str, ...]:
        """Those without which a row has no document."""
        return self.names if len(self.names) < 3 else (self.names[0], self.names[2])

    def __str__(self) -> str:
        """What is taken for what."""
        if len(self.names) == 1:
            return f"{self.kind}: column {self.names[0]} is a conversation"
        prompt = " and ".join(self.names[:-1])
        verb = "are" if len(self.names) == 3 else "is"
        return f"{self.kind}: {prompt} {verb} the prompt, {self.names[-1]} the completion"


TEXT = "text"
EXAMPLES = (
    Columns(("messages",), "messages"),
    Columns(("conversations",), "ShareGPT"),
    Columns(("instruction", "input", "output"), "Alpaca"),
    Columns(("prompt", "completion"), "pairs"),
    Columns(("question", "answer"), "pairs"),
    Columns(("query", "response"), "pairs"),
)
"""What rows without a column `text` are read as, the first whose columns they have."""


def choose_columns(column: str, present: Sequence[str]) -> Columns | None:
    """What to read of the columns that there are, by the option `text_column`; None if they lack it."""
    if column in present:
        return Columns((column,), "text" if column == TEXT else "")
    asked = Columns(tuple(part.strip() for part in column.split(",")), "pairs")
    known = EXAMPLES if column == TEXT else (asked,)
    return next((columns for columns in known if {*columns.needed} <= {*present}), None)


def check_columns(column: str) -> None:
    """An InputError for an option `text_column` that names more columns than an example has."""
    if len(names := column.split(",")) > 3:
        raise InputError(
            f"text_column {column!r} names {len(names)} columns: expected the text's, PROMPT,COMPLETION or "
            "PROMPT,INPUT,COMPLETION"
        )


def no_columns(column: str, present: Iterable[str]) -> InputError:
    """What to say of rows that lack the columns."""
    return InputError(
        f"has no column {column!r}, it has {', '.join(present)}: choose one with --text_column, "
        "PROMPT,COMPLETION or PROMPT,INPUT,COMPLETION (gpt fit: --data.text_column)"
    )


@dataclass
class Tolerance:
    """How many rows that cannot be used may be left out, and how many were."""

    most: int = 0
    skipped: int = field(default=0, init=False)
    first: str = field(default="", init=False)
    """What is wrong with the first."""

    def skip(self, name: str, message: str) -> None:
        """Leave out a row of a file; an InputError beyond the limit."""
        if self.skipped == self.most:
            limit = (
                f"{self.most:,} bad rows are left out already by" if self.most else "leave out bad rows with"
            )
            raise InputError(f"{message}; {limit} --skip_bad_rows (gpt fit: --data.skip_bad_rows)")
        self.skipped += 1
        self.first = self.first or f"{name} {message}"

    def tell(self) -> None:
        """Say once how many were left out."""
        if self.skipped:
            notice_once(f"{self.skipped:,} bad rows were left out, the first: {self.first}")


def cut(documents: Iterable[Document]) -> Iterator[Piece]:
    """Documents cut into pieces."""
    for document in documents:
        first = True
        for text, scored in document:
            for part in split_at_words(whole_characters(text), LONGEST_PIECE):
                yield Piece(part, first, scored)
                first = False


def read_documents(
    name: str, rows: Iterable[Row], column: str, template: Template, tolerance: Tolerance
) -> Iterator[Document]:
    """The documents in the rows of a file.

    The first row that has the columns decides which they are; those that lack them are left out and counted.
    InputError where no row has them, or for more bad rows than are tolerated.
    """
    columns: Columns | None = None
    lacking: Counter[tuple[str, ...]] = Counter()
    for row in rows:
        try:
            value = row.value
            if not isinstance(value, dict):
                raise _no_row(value)
            if columns is None and (columns := choose_columns(column, list(value))):
                _tell(name, columns, value)
            if columns is None or not all(map(value.__contains__, columns.needed)):
                lacking[tuple(value)] += 1
                continue
            yield _read_row(columns, value, template)
        except InputError as error:
            tolerance.skip(name, f"in {place(name, row)}: {error}")
    if lacking and columns is None:
        raise no_columns(column, next(iter(lacking)))
    if columns and (count := lacking.total()):
        what = ", ".join(next(iter(lacking))) or "nothing"
        needed = " or ".join(columns.needed)
        notice_once(f"{name}: {count:,} rows without {needed} were left out; the first has {what}")


def _no_row(value: Any) -> InputError:
    """What to say of a row without columns."""
    return value if isinstance(value, InputError) else InputError(f"expected an object, got {shown(value)}")


def _tell(name: str, columns: Columns, row: dict[str, Any]) -> None:
    """Say what is taken for what, unless it is a text as usual."""
    if columns.kind != TEXT and columns.kind:
        notice_once(f"{name} is read as {columns}")
    elif columns.kind == TEXT and (other := next((e for e in EXAMPLES if {*e.needed} <= {*row}), None)):
        names = ",".join(name for name in other.names if name in row)
        notice_once(
            f"{name}: column text is read, as plain text; --data.text_column {names} reads its examples"
        )


def _read_row(columns: Columns, row: dict[str, Any], template: Template) -> Document:
    """The document of a row's columns; none of one whose text, or one of its completions, is empty."""
    if len(columns.names) > 1:
        *prompt, completion = (_text(name, row.get(name)) for name in columns.names)
        asked = {"role": "user", "content": "\n\n".join(filter(None, prompt))}
        return _example([asked, {"role": "assistant", "content": completion}], template)
    (name,) = columns.names
    value = row[name]
    if columns in EXAMPLES or isinstance(value, list):
        return _example(_messages(value), template)
    text = _text(name, value)
    return [Part(text, True)] if text else []


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str | None):
        raise InputError(f"column {name!r} holds {type(value).__name__}, expected text")
    return value or ""


def _messages(value: Any) -> Any:
    """The messages of a conversation, as OpenAI has them or ShareGPT; the template checks what they are."""
    if isinstance(value, str):  # all that CSV has
        with suppress(ValueError):
            value = parse_json(value)
    if not isinstance(value, list):
        return value
    return [_openai(message) if isinstance(message, dict) else message for message in value]


def _openai(message: dict[str, Any]) -> dict[str, Any]:
    if "role" in message or not isinstance(sender := message.get("from"), str):
        return message
    return {"role": _ROLES.get(sender, sender), "content": message.get("value")}


def _example(messages: Any, template: Template) -> Document:
    *parts, (rest, _) = template.parts(messages)
    if rest:
        raise InputError(f"its last message is the {messages[-1]['role']}'s, expected the assistant's")
    return parts if all(text.strip() for text, scored in parts if scored) else []
