"""Turn token ids into text as they come: complete characters only, up to a stop string."""

import codecs
from collections.abc import Sequence

from gpt.errors import InputError
from gpt.text.tokenizer import Tokenizer


class TextStream:
    """A decoder that turns the ids of one text into pieces of text as they come.

    Bytes wait until they form a complete UTF-8 character. Text waits while it may be the beginning of a stop
    string. So a piece never has to be taken back. A stop string may span tokens. The text ends before the
    first one, and `stopped` is then true. Raises InputError for an empty stop string.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self.tokenizer = tokenizer
        self.stopped = False
        self.stop = (stop,) if isinstance(stop, str) else tuple(stop)
        if "" in self.stop:
            raise InputError("a stop string must have at least one character")
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def feed(self, token: int, *, typed: int = 0) -> str:
        """Add a token. Return the text that is now complete, often "". `<|endoftext|>` has no text.

        The first `typed` bytes of the token belong to the prompt and are left out.
        """
        if token == self.tokenizer.eot:
            return ""
        return self._release(self._decoder.decode(self.tokenizer.decode_bytes([token])[typed:]))

    def echo(self, token: int, typed: int | None = None) -> str:
        """Add a token of the prompt, or only its first `typed` bytes. Return the text that is now complete.

        Stop strings have no effect in the prompt.
        """
        if token == self.tokenizer.eot:
            return ""
        return self._decoder.decode(self.tokenizer.decode_bytes([token])[:typed])

    def close(self) -> str:
        """Return the rest of the text after the last token. An incomplete character becomes U+FFFD."""
        text = self._release(self._decoder.decode(b"", final=True)) + self._held
        self._held = ""
        return text

    def _release(self, text: str) -> str:
        if self.stopped:
            return ""
        text = self._held + text
        starts = [text.find(stop) for stop in self.stop if stop in text]
        self.stopped = bool(starts)
        if starts:
            self._held = ""
            return text[: min(starts)]
        known = len(text) - self._unsure(text)
        self._held = text[known:]
        return text[:known]

    def _unsure(self, text: str) -> int:
        """Count the characters at the end that may be the beginning of a stop string."""
        longest = 0
        for stop in self.stop:
            for length in range(longest + 1, len(stop)):
                if text.endswith(stop[:length]):
                    longest = length
        return longest
