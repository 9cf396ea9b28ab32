"""Text from token ids: complete characters as soon as they are known, up to a stop string."""

import codecs
from collections.abc import Sequence

from gpt.errors import InputError
from gpt.text.tokenizer import Tokenizer


class TextStream:
    """Turns the ids of one text into pieces of it as they come.

    Bytes wait until they are a complete UTF-8 character, and text waits while it may be the beginning of a
    string of `stop`, so a piece never has to be taken back. Such strings may span tokens; an empty one raises
    InputError. The text ends before the first of them, and `stopped` is true then.
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
        """The text that is known after `token`, often "". `<|endoftext|>` has no text.

        So many bytes at its beginning are `typed`: they are the prompt's, and left out.
        """
        if token == self.tokenizer.eot:
            return ""
        return self._release(self._decoder.decode(self.tokenizer.decode_bytes([token])[typed:]))

    def echo(self, token: int, typed: int | None = None) -> str:
        """The text that is known after a token of the prompt, or `typed` bytes of it.

        Stop strings do not count in it.
        """
        if token == self.tokenizer.eot:
            return ""
        return self._decoder.decode(self.tokenizer.decode_bytes([token])[:typed])

    def close(self) -> str:
        """The rest of the text after the last token; an incomplete character becomes U+FFFD."""
        text = self._release(self._decoder.decode(b"", final=True)) + self._held
        self._held = ""
        return text

    def _release(self, text: str) -> str:
        if self.stopped:
            return ""
        text = self._held + text
        found = [index for index in map(text.find, self.stop) if index >= 0]
        self.stopped = bool(found)
        # So many characters at the end may begin a stop string.
        held = [n for one in self.stop for n in range(len(one)) if text.endswith(one[:n])]
        known = min(found) if found else len(text) - max(held, default=0)
        self._held = "" if found else text[known:]
        return text[:known]
