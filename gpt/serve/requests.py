"""The bodies of requests and the choices of a completion, in the OpenAI form."""

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from gpt.errors import InputError
from gpt.generation import Piece, Request, Sampling
from gpt.serve.limits import Limits
from gpt.tokenizer import Tokenizer

MAX_LOGPROBS = 5
"""The most that OpenAI's API allows as `logprobs`."""


class CompletionRequest(BaseModel):
    """The fields of the OpenAI form, then the engine's own.

    A field that this server does not support is refused, not ignored.
    """

    model_config = ConfigDict(extra="forbid")

    model: str
    prompt: str | list[str] | list[int] | list[list[int]] = ""
    max_tokens: int | None = Field(default=16, ge=0)
    temperature: float | None = Field(default=1.0, ge=0, le=100)
    top_p: float | None = Field(default=1.0, gt=0, le=1)
    n: int | None = Field(default=1, ge=1)
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    echo: Literal[False] | None = False
    stop: str | list[str] | None = None
    presence_penalty: Literal[0] | None = 0
    frequency_penalty: Literal[0] | None = 0
    best_of: int | None = None
    logit_bias: None = None
    user: str | None = None
    seed: int | None = None
    suffix: None = None

    top_k: int | None = Field(default=None, ge=1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float = Field(default=1.0, gt=0, le=100)
    allow_special: bool = False

    @property
    def stops(self) -> list[str]:
        """The stop strings as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    def requests(self, tokenizer: Tokenizer, limits: Limits) -> list[Request]:
        """The engine's requests, one for each prompt.

        Raises:
            InputError: more than a limit allows, or a token id outside the vocabulary.
        """
        n, max_tokens = self.n or 1, 16 if self.max_tokens is None else self.max_tokens
        if self.best_of not in (None, n):
            raise InputError(f"best_of must equal n, got {self.best_of}")
        prompts = self._prompts(tokenizer)
        limits.check("prompts times n", len(prompts) * n, limits.samples)
        limits.check("max_tokens", max_tokens, limits.new_tokens)
        limits.check("stop strings", len(self.stops), limits.stops)
        for stop in self.stops:
            limits.check("characters of a stop string", len(stop), limits.stop_characters)
        for prompt in prompts:
            limits.check("prompt tokens", len(prompt), limits.prompt_tokens)
        return [
            Request(
                tokens=prompt or [tokenizer.eot],
                max_new_tokens=max_tokens,
                sampling=self._sampling(),
                seed=self.seed,
                samples=n,
                end=tokenizer.eot,
                alternatives=self.logprobs,
            )
            for prompt in prompts
        ]

    def _sampling(self) -> Sampling:
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
        )

    def _prompts(self, tokenizer: Tokenizer) -> list[list[int]]:
        given = self.prompt
        prompts_given: list[Any] = [given] if isinstance(given, str) or _is_ids(given) else list(given)
        if not prompts_given:
            raise InputError("expected at least one prompt, got an empty list")
        prompts = [
            tokenizer.encode(one, allow_special=self.allow_special) if isinstance(one, str) else list(one)
            for one in prompts_given
        ]
        for prompt in prompts:
            tokenizer.decode_bytes(prompt)  # raises for an id outside the vocabulary
        return prompts


class AttentionRequest(BaseModel):
    """The body of `POST /attention`, which the page sends: it shows the attention of the last token."""

    model_config = ConfigDict(extra="forbid")

    prompt: str = ""
    tokens: list[int] = []
    """Ids that follow the prompt."""


class Choice:
    """Turns the pieces of one sample into `choices` entries, one for all or one for each."""

    def __init__(self, index: int, tokenizer: Tokenizer) -> None:
        self.index, self.tokenizer = index, tokenizer
        self.length = self.tokens = 0

    def entry(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """The entry for the pieces that follow those of earlier entries."""
        text, logprobs = "".join(piece.text for piece in pieces), None
        if pieces and pieces[0].token.log_probability is not None:
            logprobs = self._logprobs(pieces)
        self.length += len(text)
        self.tokens += len(pieces)
        finish = pieces[-1].finished if pieces else "length"
        return {"text": text, "index": self.index, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        offsets, offset = [], self.length
        for piece in pieces:
            offsets.append(offset)
            offset += len(piece.text)
        return {
            "tokens": [self._name(piece.token.id) for piece in pieces],
            "token_logprobs": [piece.token.log_probability for piece in pieces],
            "top_logprobs": [{self._name(i): p for i, p in piece.token.alternatives} for piece in pieces],
            "text_offset": offsets,
            "token_ids": [piece.token.id for piece in pieces],  # not OpenAI's; the page needs it
        }

    def _name(self, token: int) -> str:
        """The token's text; part of a character is written as OpenAI does, `bytes:\\xf0\\x9f`."""
        data = self.tokenizer.decode_bytes([token])
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _is_ids(prompt: Sequence[Any]) -> bool:
    return bool(prompt) and isinstance(prompt[0], int)
