"""Turn rows into documents, piece by piece: texts, examples with prompts and replies, conversations."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from gpt.data.columns import Columns, choose_columns, lacks_columns
from gpt.data.row import Row
from gpt.data.rows import position_of
from gpt.errors import InputError
from gpt.plain import Json, JsonObject, parse_json, shown
from gpt.progress import counted, notice_once
from gpt.text.template import Part, Template, plain_message
from gpt.text.tokenizer import split_at_words, whole_characters

_LONGEST_PIECE = 1 << 20  # characters
_ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's names


class Piece(NamedTuple):
    """A document or a part of one. Its text is never empty, except that of a prompt."""

    text: str
    first: bool = True  # whether a document begins with this piece
    scored: bool = True  # whether the model learns to write it
    split: str = ""  # `train` or `val`, see `gpt.data.split`
    ends: bool = False  # whether it is the last piece of a reply; a text ends where the next one begins
    key: str = ""  # of the first piece of an example: see `_Document.key`

    @property
    def begins_example(self) -> bool:
        """Whether an example begins with this piece: its text before the first reply, which is not scored."""
        return self.first and not self.scored


class _Document(NamedTuple):
    """A text, which has one part, or an example, which has several."""

    parts: list[Part]
    key: str = ""
    """What decides an example's split: examples with equal keys are in the same one."""


@dataclass
class Tolerance:
    """A count of rows that cannot be used and are left out, and the most that may be."""

    most: int
    skipped: int = 0
    first: str = ""
    """What is wrong with the first row that was left out."""

    def skip(self, name: str, row: Row, error: InputError) -> None:
        """Leave out a row of a file. Raises InputError beyond the limit.

        To tell the position of a row, the file is read up to it. So only the messages that are shown tell it.
        """
        if self.skipped == self.most:
            option = "--skip_bad_rows (gpt fit: --data.skip_bad_rows)"
            if self.most:
                advice = f"{counted(self.most, 'bad row')} left out already by {option}"
            else:
                advice = f"leave out bad rows with {option}"
            raise InputError(f"in {position_of(name, row)}: {error}; {advice}")
        if not self.skipped:
            self.first = f"{name} in {position_of(name, row)}: {error}"
        self.skipped += 1

    def tell(self) -> None:
        """Tell the user how many rows were left out."""
        if self.skipped:
            notice_once(f"left out {counted(self.skipped, 'bad row')}, the first: {self.first}")


def read_documents(
    name: str, rows: Iterable[Row], text_column: str, template: Template, tolerance: Tolerance
) -> Iterator[Piece]:
    """Yield the documents in the rows of a file, in pieces of at most `_LONGEST_PIECE` characters.

    The first row with known columns decides which columns are read. Rows that lack them, and empty ones, are
    left out and counted. Raises InputError if no row has them, or if there are more bad rows than are
    tolerated.
    """
    reader = _RowReader(name, text_column, template)
    for row in rows:
        try:
            document = reader.read(row.value)
        except InputError as error:
            tolerance.skip(name, row, error)
            continue
        if document is not None:
            yield from _cut(document)
    reader.end()


def _cut(document: _Document) -> Iterator[Piece]:
    first = True
    for part in document.parts:
        texts = list(split_at_words(whole_characters(part.text), _LONGEST_PIECE))
        for number, text in enumerate(texts, start=1):
            key = whole_characters(document.key) if first else ""
            yield Piece(text, first, part.scored, ends=part.ends and number == len(texts), key=key)
            first = False


@dataclass
class _RowReader:
    """Turns the rows of one file into documents, and counts those that are left out."""

    file: str
    text_column: str
    template: Template
    columns: Columns | None = None
    """The columns of the file, once a row has known ones."""
    empty: int = 0
    lacking: int = 0
    """The number of rows that lack the needed columns."""
    first_lacking: tuple[str, ...] = ()
    """The columns that the first of these has."""

    def read(self, row: Json) -> _Document | None:
        """Return the document of a row; None if it is left out. Raises InputError for a bad row."""
        if isinstance(row, InputError):
            raise row
        if not isinstance(row, dict):
            raise InputError(f"expected an object, got {shown(row)}")
        if self.columns is None:
            self.columns = choose_columns(self.file, self.text_column, row)
        if self.columns is None or not self.columns.are_in(row):
            if not self.lacking:
                self.first_lacking = tuple(row)
            self.lacking += 1
            return None
        document = _read_row(self.columns, row, self.template)
        if document is None:
            self.empty += 1
        return document

    def end(self) -> None:
        """Tell the user what was left out. Raises InputError if no row had known columns."""
        if self.empty:
            rows = counted(self.empty, "row")
            notice_once(f"{self.file}: left out {rows} without text or without a completion")
        if not self.lacking:
            return
        if self.columns is None:
            raise lacks_columns(self.text_column, self.first_lacking)
        rows = counted(self.lacking, "row")
        needed = " or ".join(self.columns.needed)
        has = ", ".join(self.first_lacking) or "nothing"
        notice_once(f"{self.file}: left out {rows} without {needed}; the first has {has}")


def _read_row(columns: Columns, row: JsonObject, template: Template) -> _Document | None:
    """Return the document in a row's columns.

    None if the row's text, its list of messages, or one of its completions is empty.
    """
    if columns.kind == "pair":
        *prompt, completion = (_text(name, row.get(name)) for name in columns.names)
        asked = {"role": "user", "content": "\n\n".join(text for text in prompt if text)}
        return _example([asked, {"role": "assistant", "content": completion}], template)
    (name,) = columns.names
    value = row[name]
    if columns.kind == "messages" or isinstance(value, list):
        messages = _messages(value)
        return _example(messages, template) if messages else None
    text = _text(name, value)
    return _Document([Part(text, scored=True, ends=False)]) if text else None


def _text(name: str, value: object) -> str:
    if not isinstance(value, str | None):
        raise InputError(f"column {name!r} holds {type(value).__name__}, expected text")
    return value or ""


def _messages(value: Json) -> Json:
    """Return the messages of a conversation, converted to OpenAI's form.

    `Template.parts` checks them later.
    """
    if isinstance(value, str):  # CSV has only strings, so the messages are JSON in one
        with suppress(ValueError):
            value = parse_json(value)
    if not isinstance(value, list):
        return value
    return [_openai(message) if isinstance(message, dict) else message for message in value]


def _openai(message: JsonObject) -> JsonObject:
    """Return a message of ShareGPT or OpenAI in OpenAI's older form; unchanged if it has neither form."""
    sender, text = message.get("from"), message.get("value")
    if "role" not in message and isinstance(sender, str) and isinstance(text, str):
        others = {key: value for key, value in message.items() if key not in ("from", "value")}
        return {**others, "role": _ROLES.get(sender, sender), "content": text}
    return plain_message(message)


def _example(messages: Json, template: Template) -> _Document | None:
    """Return the document of a conversation; None if a reply is empty, or none is scored.

    Raises InputError if the messages have another form, or do not end with a reply.
    """
    parts, rest = template.parts(messages)
    if rest:
        raise InputError(f"its last message is the {messages[-1]['role']}'s, expected the assistant's")
    replies = [part.text for part in parts if part.scored]
    if not replies or not all(map(str.strip, replies)):
        return None
    first_reply = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
    is_asked = any(message["role"] == "user" and message["content"] for message in messages[:first_reply])
    # Examples with the same prompt stay together. Without a question the prompt says nothing of the example.
    return _Document(parts, key=parts[0].text if is_asked else "".join(part.text for part in parts))
