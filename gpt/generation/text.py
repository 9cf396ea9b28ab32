"""From token ids to text that can be shown at once: whole characters, up to a stop string."""

import codecs
from collections.abc import Sequence

from gpt.errors import InputError
from gpt.tokenizer import Tokenizer


class TextStream:
    """Turns ids into text as they come.

    Bytes wait until they are a whole UTF-8 character, and text waits while it may be the beginning of a stop
    string, so what was given out never has to be taken back. `stopped` tells that a stop string came; the
    text ends before it.

    Args:
        tokenizer: of the model that makes the ids.
        stop: strings at which the text ends; they may span tokens.

    Raises:
        InputError: an empty stop string.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        if "" in stop:
            raise InputError("a stop string must have at least one character")
        self.tokenizer = tokenizer
        self.stop = tuple(stop)
        self.stopped = False
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def feed(self, token: int) -> str:
        """What can be shown now that `token` came; often "". The end of text has no text."""
        if token == self.tokenizer.eot:
            return ""
        return self._release(self._decoder.decode(self.tokenizer.decode_bytes([token])))

    def close(self) -> str:
        """What is left once no token comes any more; half a character comes out as U+FFFD."""
        text = self._release(self._decoder.decode(b"", final=True))
        text, self._held = text + self._held, ""
        return text

    def _release(self, text: str) -> str:
        if self.stopped:
            return ""
        text = self._held + text
        found = [index for index in (text.find(stop) for stop in self.stop) if index >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        waiting = max((_overlap(text, stop) for stop in self.stop), default=0)
        self._held = text[len(text) - waiting :]
        return text[: len(text) - waiting]


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` are the beginning of `stop`, but not all of it."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
