"""Choose the columns of a file of rows from which documents are made, by the option `text_column`."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from gpt.errors import InputError
from gpt.progress import notice_once


@dataclass(frozen=True)
class Columns:
    """The columns from which a row's document is made."""

    kind: Literal["text", "messages", "pair"]
    """One column holds a text, or the messages of a conversation. A pair is a prompt and its completion."""
    names: tuple[str, ...]
    """Those of a pair are two, or three: then the middle one holds an input that belongs to the prompt."""
    style: str = ""
    """The name of this form of examples; empty for plain text."""

    @property
    def needed(self) -> tuple[str, ...]:
        """The columns that a row must have. The input of a pair may be missing."""
        return (self.names[0], self.names[-1]) if self.kind == "pair" else self.names

    def are_in(self, present: Collection[str]) -> bool:
        """Whether a row or a file with these columns has the needed ones."""
        return all(name in present for name in self.needed)

    def __str__(self) -> str:
        """Say how the columns are read, for a notice to the user."""
        if self.kind == "messages":
            return f"{self.style}: column {self.names[0]} is a conversation"
        prompt = " and ".join(self.names[:-1])
        verb = "are" if len(self.names) == 3 else "is"
        return f"{self.style}: {prompt} {verb} the prompt, {self.names[-1]} the completion"


_MOST_COLUMNS = 3  # of a pair
TEXT = "text"
"""The default of `text_column`: a column of this name, or else examples."""
EXAMPLES = (
    Columns("messages", ("messages",), "messages"),
    Columns("messages", ("conversations",), "ShareGPT"),
    Columns("pair", ("instruction", "input", "output"), "Alpaca"),
    Columns("pair", ("prompt", "completion"), "pairs"),
    Columns("pair", ("question", "answer"), "pairs"),
    Columns("pair", ("query", "response"), "pairs"),
)
"""The forms of examples. Rows without a column `text` are read as the first whose columns they have."""


def choose_columns(name: str, option: str, present: Collection[str]) -> Columns | None:
    """Return the columns to read of a file that has these, by the option `text_column`, and tell the user.

    None if the file lacks what the option asks for. Nothing is told of plain text, unless the file has the
    columns of examples too.
    """
    columns = _meant(option, present)
    examples = _examples_in(present)
    if columns is not None and columns.kind != "text":
        notice_once(f"{name} is read as {columns}")
    elif columns is not None and columns.names == (TEXT,) and examples is not None:
        names = ",".join(column for column in examples.names if column in present)
        what = f"column text is read, as plain text; --data.text_column {names} reads its examples"
        notice_once(f"{name}: {what}")
    return columns


def _meant(option: str, present: Collection[str]) -> Columns | None:
    if option in present:  # even if the name has a comma
        same_name = (known for known in EXAMPLES if known.names == (option,))
        return next(same_name, Columns("text", (option,)))
    if option == TEXT:
        return _examples_in(present)
    names = tuple(name.strip() for name in option.split(","))
    listed = Columns("pair" if len(names) > 1 else "text", names, "pairs")
    return listed if len(names) <= _MOST_COLUMNS and listed.are_in(present) else None


def _examples_in(present: Collection[str]) -> Columns | None:
    return next((known for known in EXAMPLES if known.are_in(present)), None)


def lacks_columns(option: str, present: Iterable[str]) -> InputError:
    """Return the error for a file that has only these columns."""
    return InputError(
        f"has no column {option!r}, it has {', '.join(present) or 'nothing'}: choose one with --text_column, "
        "PROMPT,COMPLETION or PROMPT,INPUT,COMPLETION (gpt fit: --data.text_column)"
    )
