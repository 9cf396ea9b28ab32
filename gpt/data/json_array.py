"""Read the values of a JSON array one by one. Only a part of its text is in memory."""

import json
import re
from collections.abc import Iterator

from gpt.data.row import LONGEST_VALUE, Row
from gpt.errors import InputError
from gpt.plain import Json

_BETWEEN = re.compile(r"[\s,]*")  # what separates the values of an array
_LONGEST_LITERAL = 16  # characters; no JSON literal or escape, such as -Infinity, is longer


def array_rows(texts: Iterator[str]) -> Iterator[Row]:
    """Yield the values of a JSON array, given its text in parts that may end anywhere.

    A comma may follow the last value.
    """
    unread = _Unread(texts)
    unread.go_on(unread.text.index("[") + 1)
    while not unread.text.startswith("]", unread.at):
        value, end = unread.parse()
        yield Row(unread.line, value)
        unread.go_on(end)
    unread.check_end()


class _Unread:
    """The text of an array from the next value on. More of it is read when it is needed."""

    def __init__(self, texts: Iterator[str]) -> None:
        self.text = next(texts, "")
        self._later = texts  # what follows `text` in the file
        self.at = 0
        """The place in `text` that is parsed next. What is before it is dropped when more is read."""
        self.line = 1
        """The number of the line in the file at this place."""
        self._decode = json.JSONDecoder().raw_decode

    def go_on(self, place: int) -> None:
        """Go to a later place in `text`, and from there to the next value or the end of the array."""
        while True:
            begin = _BETWEEN.match(self.text, place).end()  # type: ignore[union-attr]  # it matches nothing, too
            self.line += self.text.count("\n", self.at, begin)
            self.at = begin
            if begin < len(self.text) or not self._read_more():
                return
            place = 0

    def parse(self) -> tuple[Json, int]:
        """Return the value that begins here, and the place in `text` where it ends.

        Raises InputError if there is no value, or too deep a one.
        """
        while True:
            try:
                return self._decode(self.text, self.at)
            except json.JSONDecodeError as error:
                if self._may_be_cut(error) and self._read_more():
                    continue
                line = self.line + self.text.count("\n", self.at, error.pos)
                raise InputError(f"in line {line}: the array is no JSON, {error.msg}") from None
            except RecursionError:
                raise InputError("is nested too deeply") from None
            except ValueError as error:  # Python refuses to parse a number of thousands of digits
                raise InputError(f"in line {self.line}: {error}") from None

    def check_end(self) -> None:
        """Raise InputError if text follows the bracket that is here."""
        rest = self.text[self.at + 1 :] + next(self._later, "")
        if rest.strip():
            raise InputError(f"in line {self.line}: text follows the end of the array")

    def _may_be_cut(self, error: json.JSONDecodeError) -> bool:
        """Whether the value is perhaps only incomplete, so that more text could make it valid."""
        at_end = error.pos > len(self.text) - _LONGEST_LITERAL or error.msg.startswith("Unterminated")
        return at_end and len(self.text) - self.at < LONGEST_VALUE

    def _read_more(self) -> bool:
        """Drop what is parsed, and read at least as much as is left. Return whether there was more to read.

        An incomplete value is parsed again from its beginning. As the text doubles each time, the time grows
        only with the file.
        """
        left = self.text[self.at :]
        more: list[str] = []
        for part in self._later:
            more.append(part)
            if sum(map(len, more)) >= len(left):
                break
        if not more:
            return False
        self.text = "".join([left, *more])
        self.at = 0
        return True
