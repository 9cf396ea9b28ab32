"""Read the values of a JSON array one by one. Only a part of its text is in memory."""

import json
import re
from collections.abc import Iterator

from gpt.data.row import LONGEST_VALUE, Row
from gpt.errors import InputError
from gpt.plain import Json

_BETWEEN = re.compile(r"\s*(,?)\s*")  # what separates the values of an array
_LONGEST_LITERAL = 16  # characters; no JSON literal or escape, such as -Infinity, is longer
_OPEN_END = 2  # characters, such as `e+`: what more text makes part of the number before


def array_rows(texts: Iterator[str]) -> Iterator[Row]:
    """Yield the values of a JSON array, given its text in parts that may end anywhere.

    A comma may follow the last value.
    """
    unread = _Unread(texts)
    has_comma = unread.go_on(unread.text.index("[") + 1)
    if has_comma:
        raise unread.error("Expecting value")
    while not unread.text.startswith("]", unread.at):
        value, end = unread.parse()
        yield Row(unread.line, value)
        has_comma = unread.go_on(end)
        if not has_comma and not unread.text.startswith("]", unread.at):
            raise unread.error("Expecting ',' delimiter")
    unread.check_end()


class _Unread:
    """The text of an array from the next value on. More of it is read when it is needed."""

    def __init__(self, texts: Iterator[str]) -> None:
        self.text = next(texts, "")
        self._later = texts  # what follows `text` in the file
        self.at = 0
        """The place in `text` of the next value, or of the end. What is before it is dropped when more is
        read."""
        self.line = 1
        """The number of the line in the file at this place."""
        self._decode = json.JSONDecoder().raw_decode

    def go_on(self, place: int) -> bool:
        """Go to a later place in `text`, and from there to the next value or the end of the array.

        Return whether a comma stands between. Afterwards `at` and `line` are those of what was found, or of
        the end of the file.
        """
        between = _BETWEEN.match(self.text, place)
        assert between  # it matches nothing, too
        while between.end() == len(self.text):  # blanks or the comma may follow in the next part
            self._go_to(place)
            if not self._read_more():
                break
            place = 0
            between = _BETWEEN.match(self.text)
            assert between
        self._go_to(between.end())
        return between[1] == ","

    def _go_to(self, place: int) -> None:
        self.line += self.text.count("\n", self.at, place)
        self.at = place

    def parse(self) -> tuple[Json, int]:
        """Return the value that begins here, and the place in `text` where it ends.

        `at` and `line` stay where the value begins, though more text may be read. Raises InputError if there
        is no value, or too deep or too long a one.
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
                raise self.error(error.msg, error.pos) from None
            except RecursionError:
                raise InputError("is nested too deeply") from None
            except ValueError as error:  # Python refuses to parse a number of thousands of digits
                raise InputError(f"in line {self.line}: {error}") from None
            is_near_end = end >= len(self.text) - _OPEN_END
            if is_near_end and isinstance(value, int | float) and self._read_more():
                continue
            return value, end

    def error(self, what: str, place: int | None = None) -> InputError:
        """Return the error for wrong syntax at this place in `text`, by default at the present one."""
        line = self.line + self.text.count("\n", self.at, self.at if place is None else place)
        return InputError(f"in line {line}: the array is no JSON, {what}")

    def check_end(self) -> None:
        """Raise InputError if text follows the bracket that is here. All of it is read."""
        rest: str | None = self.text[self.at + 1 :]
        while rest is not None:
            if rest.strip():
                raise InputError(f"in line {self.line}: text follows the end of the array")
            rest = next(self._later, None)

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
