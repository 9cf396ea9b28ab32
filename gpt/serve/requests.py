"""The bodies of requests and the choices of a completion, in the OpenAI form."""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from gpt.errors import InputError
from gpt.generation import Piece, Request, Sampling, Token
from gpt.serve.limits import Limits
from gpt.tokenizer import Tokenizer

MAX_PROMPTS = 1024
MAX_LOGPROBS = 5
"""The most that OpenAI's API allows as `logprobs`."""


Ids = Annotated[list[int], Field(fail_fast=True)]
Number = Annotated[float, Field(allow_inf_nan=False)]


def _check_entries(value: Any, most: int) -> Any:
    """Refuse an object of many entries before each of them makes an error of its own."""
    if isinstance(value, dict) and len(value) > most:
        raise ValueError(f"expected at most {most} entries, got {len(value)}")
    return value


class _Form(BaseModel):
    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, value: Any) -> Any:
        return _check_entries(value, 64)


class CompletionRequest(_Form):
    """The fields of the OpenAI form, then the engine's own.

    A field that this server does not support is refused, not ignored.
    """

    model: str | None = None
    prompt: (
        str
        | Annotated[list[str], Field(max_length=MAX_PROMPTS, fail_fast=True)]
        | Ids
        | Annotated[list[Ids], Field(max_length=MAX_PROMPTS, fail_fast=True)]
    ) = ""
    max_tokens: int | None = Field(default=16, ge=0)
    temperature: Number | None = Field(default=1.0, ge=0, le=100)
    top_p: Number | None = Field(default=1.0, ge=1e-6, le=1)
    n: int | None = Field(default=1, ge=1)
    stream: bool | None = False
    stream_options: (
        Annotated[dict[str, bool | None], BeforeValidator(partial(_check_entries, most=8))] | None
    ) = None
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = False
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    presence_penalty: Number | None = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: Number | None = Field(default=0.0, ge=-2, le=2)
    best_of: int | None = None
    logit_bias: (
        Annotated[
            dict[int, Annotated[Number, Field(ge=-100, le=100)]],
            BeforeValidator(partial(_check_entries, most=300)),
        ]
        | None
    ) = None
    user: str | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    suffix: Literal[""] | None = None

    top_k: int | None = Field(default=None, ge=1)
    min_p: Number | None = Field(default=None, ge=0, le=1)
    repetition_penalty: Number = Field(default=1.0, ge=0.01, le=100)
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
                echo=bool(self.echo),
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
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=tuple(sorted((self.logit_bias or {}).items())),
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


class AttentionRequest(_Form):
    """The body of `POST /attention`, which the page sends: it shows the attention of the last token."""

    prompt: str = ""
    tokens: Ids = []
    """Ids that follow the prompt."""


class Choice:
    """Turns the pieces of one sample into `choices` entries, one for all or one for each."""

    def __init__(self, index: int, tokenizer: Tokenizer, logprobs: bool) -> None:
        self.index, self.tokenizer, self.logprobs = index, tokenizer, logprobs
        self.length, self.finished = 0, False

    def entry(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """The entry for the pieces that follow those of earlier entries; without any, the sample ended."""
        text = "".join(piece.text for piece in pieces)
        logprobs = self._logprobs(pieces) if self.logprobs else None
        self.length += len(text)
        finish = pieces[-1].finished if pieces else "length"
        self.finished = finish is not None
        return {"text": text, "index": self.index, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        offsets = list(accumulate((len(piece.text) for piece in pieces), initial=self.length))
        tokens = [piece.token for piece in pieces]
        return {
            "tokens": [self._name(token.id) for token in tokens],
            "token_logprobs": [token.log_probability for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": offsets[:-1],
            "token_ids": [token.id for token in tokens],  # not OpenAI's; the page needs it
        }

    def _top(self, token: Token) -> dict[str, float] | None:
        """The likeliest tokens and the chosen one; None for the first token of an echoed prompt."""
        if token.log_probability is None:
            return None
        top = {self._name(id_): value for id_, value in token.alternatives}
        return {**top, self._name(token.id): token.log_probability}

    def _name(self, token: int) -> str:
        """The token's text; part of a character is written as OpenAI does, `bytes:\\xf0\\x9f`."""
        data = self.tokenizer.decode_bytes([token])
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _is_ids(prompt: Sequence[Any]) -> bool:
    return bool(prompt) and isinstance(prompt[0], int)
