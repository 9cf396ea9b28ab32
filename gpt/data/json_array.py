"""Read the values of a JSON array one by one. Only a part of its text is in memory."""

import json
import re
from collections.abc import Iterator

from gpt.data.row import LONGEST_VALUE, Row
from gpt.errors import InputError
from gpt.plain import Json

_BLANKS = re.compile(r"\s*")
_LONGEST_LITERAL = 16  # characters; no JSON literal or escape, such as -Infinity, is longer
_OPEN_END = 2  # characters, such as `e+`: what more text makes part of the number before


def array_rows(texts: Iterator[str]) -> Iterator[Row]:
    """Yield the values of a JSON array, given its text in parts that may end anywhere.

    A comma may follow the last value.
    """
    unread = _Unread(texts)
    unread.go_to(unread.text.index("[") + 1)
    while unread.next() != "]":
        line = unread.line
        yield Row(line, unread.parse())
        if unread.next() == ",":
            unread.at += 1
        elif unread.next() != "]":
            raise unread.error("Expecting ',' delimiter")
    line = unread.line
    unread.at += 1
    if unread.next():
        raise InputError(f"in line {line}: text follows the end of the array")


class _Unread:
    """The text of an array from a place on. More of it is read when it is needed."""

    def __init__(self, texts: Iterator[str]) -> None:
        self.text = next(texts, "")
        self._later = texts  # what follows `text` in the file
        self.at = 0
        """The place in `text`. What is before it is dropped when more is read."""
        self.line = 1
        """The number of the line in the file at this place."""
        self._decode = json.JSONDecoder().raw_decode

    def next(self) -> str:
        """Go to the next character that is no blank, and return it; "" at the end of the file."""
        while True:
            blanks = _BLANKS.match(self.text, self.at)
            assert blanks  # it matches nothing, too
            self.go_to(blanks.end())
            if self.at < len(self.text) or not self._read_more():
                return self.text[self.at : self.at + 1]

    def go_to(self, place: int) -> None:
        """Go to a later place in `text`."""
        self.line += self.text.count("\n", self.at, place)
        self.at = place

    def parse(self) -> Json:
        """Return the value that begins here, and go to its end.

        Raises InputError if there is no value, or too deep or too long a one.
        """
        while True:
            try:
                value, end = self._decode(self.text, self.at)
            except json.JSONDecodeError as error:
                if self._may_be_cut(error):
                    if len(self.text) - self.at >= LONGEST_VALUE:
                        what = f"a value of the array has more than {LONGEST_VALUE >> 20} MB"
                        raise InputError(f"in line {self.line}: {what}") from None
                    if self._read_more():
                        continue
                self.go_to(error.pos)
                raise self.error(error.msg) from None
            except RecursionError:
                raise InputError("is nested too deeply") from None
            except ValueError as error:  # Python refuses to parse a number of thousands of digits
                raise InputError(f"in line {self.line}: {error}") from None
            is_near_end = end >= len(self.text) - _OPEN_END
            if is_near_end and isinstance(value, int | float) and self._read_more():
                continue
            self.go_to(end)
            return value

    def error(self, what: str) -> InputError:
        """Return the error for wrong syntax at this place."""
        return InputError(f"in line {self.line}: the array is no JSON, {what}")

    def _may_be_cut(self, error: json.JSONDecodeError) -> bool:
        """Whether the value is perhaps only incomplete, so that more text could make it valid."""
        return error.pos > len(self.text) - _LONGEST_LITERAL or error.msg.startswith("Unterminated")

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
