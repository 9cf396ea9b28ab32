"""The bodies of requests and the choices of a completion, in the OpenAI form."""

from collections.abc import Sequence
from dataclasses import fields
from itertools import accumulate
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from gpt.errors import InputError
from gpt.generation import Request, Sampling, Token
from gpt.serve.engine_thread import cost
from gpt.serve.limits import Limits
from gpt.text.template import Template
from gpt.text.tokenizer import Tokenizer

Ids = Annotated[list[int], Field(fail_fast=True)]
Natural = Annotated[int, Field(ge=0, lt=2**63)]
_CHEAPER = "ask for fewer prompts, completions or tokens, or without echo or logprobs"
Stop = Annotated[str, Field(min_length=1, max_length=256)]
_PROMPTS = Field(max_length=1024, fail_fast=True)


class _Form(BaseModel):
    model_config = ConfigDict(extra="forbid")


class CompletionRequest(_Form):
    """The fields of the OpenAI form, then the engine's own; a field without support here is refused.

    `Sampling` checks the ranges of its fields.
    """

    model: str | None = None
    prompt: str | Annotated[list[str], _PROMPTS] | Ids | Annotated[list[Ids], _PROMPTS] = ""
    max_tokens: int | None = Field(default=16, ge=0)
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = Field(default=1, ge=1, lt=2**31)
    stream: bool | None = False
    stream_options: dict[str, bool | None] | None = None
    logprobs: int | None = Field(default=None, ge=0, le=5)  # as in OpenAI's API
    echo: bool | None = False
    stop: Stop | Annotated[list[Stop], Field(max_length=4, fail_fast=True)] | None = None
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    best_of: Literal[1] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    user: str | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    suffix: Literal[""] | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    snapshot: Natural | None = None  # whose model answers, that of the server without one

    def requests(self, tokenizer: Tokenizer, limits: Limits, template: Template | None) -> list[Request]:
        """One request of the engine for each prompt; InputError for what limits or the vocabulary forbid."""
        n, max_tokens = self.n or 1, self._max_tokens(limits)
        if not (max_tokens or self.echo):
            raise InputError("max_tokens must be at least 1 without echo, got 0")
        if max_tokens > limits.new_tokens:
            raise InputError(f"max_tokens must be at most {limits.new_tokens}, got {max_tokens}")
        names = {field.name for field in fields(Sampling)}
        sampling = Sampling(**self.model_dump(include=names, exclude_none=True))
        requests = [
            Request(
                tokens=prompt or [tokenizer.eot],
                max_new_tokens=max_tokens,
                sampling=sampling,
                seed=self.seed,
                samples=n,
                end=tokenizer.eot,
                stop=[self.stop] if isinstance(self.stop, str) else self.stop or [],
                alternatives=self.logprobs,
                echo=bool(self.echo),
            )
            for prompt in self._prompts(tokenizer, template)
        ]
        if (total := cost(requests)) > limits.cost:
            raise InputError(f"the request costs {total}, expected at most {limits.cost}: {_CHEAPER}")
        return requests

    def _max_tokens(self, limits: Limits) -> int:
        return 16 if self.max_tokens is None else self.max_tokens

    def _prompts(self, tokenizer: Tokenizer, template: Template | None) -> list[list[int]]:
        """The ids of each prompt: `prompt` is one or several, each as text or ids."""
        given: Any = self.prompt
        if given == []:
            raise InputError("expected at least one prompt, got an empty list")
        if isinstance(given, str) or isinstance(given[0], int):
            given = [given]
        prompts = [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in given]
        tokenizer.decode_bytes([id_ for prompt in prompts for id_ in prompt])  # raises for an unknown id
        return prompts


class _Text(_Form):
    type: Literal["text"]
    text: str


class _Message(BaseModel):
    """Clients send answers back with more fields, which are ignored."""

    role: str
    content: str | Annotated[list[_Text], _PROMPTS]


class ConversationRequest(_Form):
    """The body of `POST /conversation`, which the page sends: it completes the ids that it gets."""

    messages: Annotated[list[_Message], _PROMPTS]

    def ids(self, tokenizer: Tokenizer, template: Template) -> list[int]:
        """The ids that a reply follows; `developer` is a newer name of the role `system`."""
        messages = []
        for role, content in ((message.role, message.content) for message in self.messages):
            text = content if isinstance(content, str) else "".join(part.text for part in content)
            messages.append({"role": "system" if role == "developer" else role, "content": text})
        if messages and messages[-1]["role"] == "assistant":
            raise InputError("the last message is the assistant's, expected one to reply to")
        return template.prompt(tokenizer, messages)


class ChatRequest(CompletionRequest, ConversationRequest):
    """The body of `POST /v1/chat/completions`: that of a completion, but for the following."""

    max_tokens: int | None = Field(default=None, ge=0)
    max_completion_tokens: int | None = Field(default=None, ge=0)
    logprobs: Annotated[None, BeforeValidator(lambda value: value or None)] = None
    prompt: Literal[""] = ""
    echo: Literal[False] = False

    def _max_tokens(self, limits: Limits) -> int:
        given = (self.max_completion_tokens, self.max_tokens, limits.new_tokens)
        return next(count for count in given if count is not None)

    def _prompts(self, tokenizer: Tokenizer, template: Template | None) -> list[list[int]]:
        assert template is not None
        return [self.ids(tokenizer, template)]


class IdsRequest(_Form):
    """The body of `POST /copied`, which the page sends."""

    tokens: Ids = []

    def ids(self, tokenizer: Tokenizer) -> list[int]:
        """The ids; InputError for one outside the vocabulary."""
        tokenizer.decode_bytes(self.tokens)  # raises for it
        return self.tokens


class AttentionRequest(IdsRequest):
    """The body of `POST /attention`, which the page sends: it shows the attention of the last token."""

    prompt: str = ""  # which the tokens follow
    snapshot: Natural | None = None

    def ids(self, tokenizer: Tokenizer) -> list[int]:
        """All ids, at least one; InputError for one outside the vocabulary."""
        return tokenizer.encode(self.prompt) + super().ids(tokenizer) or [tokenizer.eot]


def log_probabilities(tokenizer: Tokenizer, tokens: Sequence[Token], offset: int) -> dict[str, Any]:
    """`logprobs` of tokens whose text begins at this character."""

    def name(id_: int) -> str:
        """The token's text; part of a character is written as OpenAI does, `bytes:\\xf0\\x9f`."""
        data = tokenizer.decode_bytes([id_])
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def top(token: Token) -> dict[str, float] | None:
        """The likeliest tokens and the chosen one; None for the first token of an echoed prompt."""
        if token.log_probability is None:
            return None
        return {name(id_): value for id_, value in (*token.alternatives, (token.id, token.log_probability))}

    return {
        "tokens": [name(token.id) for token in tokens],
        "token_logprobs": [token.log_probability for token in tokens],
        "top_logprobs": [top(token) for token in tokens],
        "text_offset": list(accumulate((len(token.text) for token in tokens), initial=offset))[:-1],
        "token_ids": [token.id for token in tokens],  # not OpenAI's; the page needs it
    }
