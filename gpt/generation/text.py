"""Text from token ids: complete characters as soon as they are known, up to a stop string."""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gpt.errors import InputError
from gpt.generation.decoding import for_decoding
from gpt.generation.engine import Engine, Request, Sample, Token
from gpt.model import GPT
from gpt.tokenizer import Tokenizer


class TextStream:
    """Turns the ids of one text into pieces of it as they come.

    Bytes wait until they are a complete UTF-8 character, and text waits while it may be the beginning of a
    stop string, so a piece never has to be taken back. `stopped` is true after a stop string; the text ends
    before it.

    Args:
        tokenizer: the model's.
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

    def feed(self, token: int, *, echoed: bool = False) -> str:
        """The text that is known after `token`, often "". `<|endoftext|>` has no text.

        Args:
            token: an id.
            echoed: whether it is a token of the prompt, in which stop strings do not count.
        """
        if token == self.tokenizer.eot:
            return ""
        text = self._decoder.decode(self.tokenizer.decode_bytes([token]))
        return text if echoed else self._release(text)

    def close(self) -> str:
        """The rest of the text after the last token; an incomplete character becomes U+FFFD."""
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


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What a step adds to one sample."""

    token: Token
    text: str
    """The text that is known now, often none."""
    finished: str | None
    """`stop` or `length` in the last piece of a sample."""


class TextEngine:
    """An engine that writes text: it decodes tokens to characters and ends samples at stop strings.

    Args:
        model: any GPT; it is left unchanged.
        tokenizer: the model's.
        options: of `Engine`.
    """

    def __init__(self, model: GPT, tokenizer: Tokenizer, **options: Any) -> None:
        vocab_size = min(tokenizer.n_vocab, model.config.vocab_size)
        self.engine = Engine(for_decoding(model), vocab_size=vocab_size, **options)
        self.tokenizer = tokenizer
        self._texts: dict[Sample, TextStream] = {}

    @property
    def busy(self) -> bool:
        """Whether there is work for another step."""
        return self.engine.busy

    @property
    def running(self) -> int:
        """How many samples are decoded now."""
        return self.engine.running

    def add(self, request: Request, stop: Sequence[str] = ()) -> list[Sample]:
        """Add a request; see `Engine.add`.

        Raises:
            InputError: an empty stop string.
        """
        texts = [TextStream(self.tokenizer, stop) for _ in range(request.samples)]
        samples = self.engine.add(request)
        self._texts.update(
            (sample, text) for sample, text in zip(samples, texts, strict=True) if not sample.finished
        )
        return samples

    def cancel(self, sample: Sample) -> None:
        """End a sample now; nothing happens if it has ended."""
        self.engine.cancel(sample)
        self._texts.pop(sample, None)

    def take_failed(self) -> list[Sample]:
        """As `Engine.take_failed`."""
        failed = self.engine.take_failed()
        for sample in failed:
            del self._texts[sample]
        return failed

    def step(self) -> list[Piece]:
        """Run one step of the engine and return what it adds to the samples."""
        return [self._piece(token) for token in self.engine.step()]

    def _piece(self, token: Token) -> Piece:
        sample = token.sample
        stream, finished = self._texts[sample], token.finished
        text = stream.feed(token.id, echoed=token.echoed)
        if stream.stopped:
            self.engine.cancel(sample)
            finished = "stop"
        if finished:
            text += stream.close()
            del self._texts[sample]
        return Piece(token=token, text=text, finished=finished)


def prompt_tokens(tokenizer: Tokenizer, prompt: str, *, allow_special: bool = False) -> list[int]:
    """The ids of a prompt; an empty prompt starts a new document.

    Args:
        tokenizer: the model's.
        prompt: the text.
        allow_special: whether `<|endoftext|>` in the prompt is the end of a document rather than plain text.
    """
    return tokenizer.encode(prompt, allow_special=allow_special) or [tokenizer.eot]


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` begin `stop` without completing it."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
