"""Choose the columns of a file of rows from which documents are made, by the option `text_column`."""

from collections.abc import Collection, Iterable, Sequence
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


@dataclass(frozen=True)
class AskedColumns:
    """The option `text_column`, parsed. Which columns it means depends on those that a file has: `choose`."""

    option: str
    """The option as it was given. A column may have exactly this name, even with a comma in it."""
    listed: Columns
    """The columns that the option lists, separated by commas: one of texts, or those of a pair. If there are
    more than three, only a column of the option's own name can be meant."""

    @classmethod
    def parse(cls, option: str) -> "AskedColumns":
        """Parse the option."""
        names = tuple(name.strip() for name in option.split(","))
        return cls(option, Columns("pair" if len(names) > 1 else "text", names, "pairs"))

    def choose(self, present: Sequence[str]) -> Columns | None:
        """Return the columns to read of rows with these columns; None if the rows lack what is asked for."""
        if self.option in present:
            same_name = (known for known in EXAMPLES if known.names == (self.option,))
            return next(same_name, Columns("text", (self.option,)))
        if self.option == TEXT:
            return next((known for known in EXAMPLES if known.are_in(present)), None)
        is_known = len(self.listed.names) <= _MOST_COLUMNS and self.listed.are_in(present)
        return self.listed if is_known else None

    def not_in(self, present: Iterable[str]) -> InputError:
        """Return the error for rows that have only these columns."""
        has = ", ".join(present) or "nothing"
        return InputError(
            f"has no column {self.option!r}, it has {has}: choose one with --text_column, "
            "PROMPT,COMPLETION or PROMPT,INPUT,COMPLETION (gpt fit: --data.text_column)"
        )


def tell_columns(name: str, columns: Columns, present: Collection[str]) -> None:
    """Tell the user how the columns are read, unless they are plain text and nothing else is possible.

    `present` are all columns of the file, or of its first row.
    """
    if columns.names == (TEXT,):
        examples = next((others for others in EXAMPLES if others.are_in(present)), None)
        if examples is not None:
            names = ",".join(column for column in examples.names if column in present)
            notice_once(
                f"{name}: column text is read, as plain text; --data.text_column {names} reads its examples"
            )
    elif columns.kind != "text":
        notice_once(f"{name} is read as {columns}")
