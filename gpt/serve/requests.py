"""The bodies of requests, and the log-probabilities of a completion, in OpenAI's form."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from itertools import accumulate
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, field_validator
from pydantic_core import PydanticCustomError

from gpt.errors import InputError
from gpt.generation import Request, Sampling, Token
from gpt.generation.healing import Prompt, typed_prompt
from gpt.plain import JsonObject
from gpt.text.template import Template, plain_message
from gpt.text.tokenizer import Tokenizer

T = TypeVar("T")
Natural = Annotated[int, Field(ge=0, lt=2**63)]
Count = Annotated[int, Field(ge=0, lt=2**31)]
Ids = Annotated[list[Count], Field(fail_fast=True)]
Stop = Annotated[str, Field(max_length=256)]
ALTERNATIVES = 5  # the most that `logprobs` may ask for, as in OpenAI's API; the page asks for so many
_PROMPTS = Field(max_length=1024, fail_fast=True)


def _by_kind(kind: Callable[[object], str | None], expected: str) -> Discriminator:
    """Choose one type of a union by the tag that `kind` gives a value; None if it suits none of them.

    Otherwise pydantic would try all types, and an error would not say which of their complaints is the cause.
    """
    return Discriminator(kind, custom_error_type="kind", custom_error_message=f"expected {expected}")


def _text_or_list(value: object) -> str | None:
    if isinstance(value, list):
        return "list"
    return "text" if isinstance(value, str) else None


def _kind_of_prompt(value: object) -> str | None:
    """Return the tag of a prompt's type. The first item of a list decides."""
    if not isinstance(value, list):
        return _text_or_list(value)
    if value and not isinstance(value[0], str):
        return "lists" if isinstance(value[0], list) else "ids"
    return "texts"


class _Form(BaseModel):
    # `strict`: a boolean, or a text with digits, is no number.
    model_config = ConfigDict(extra="forbid", strict=True)


class _Text(BaseModel):
    type: Literal["text"]
    text: str


class _Message(BaseModel):
    """A message of a chat.

    Clients send earlier answers back with further fields, which are ignored. Some have no content.
    """

    role: str
    content: (
        Annotated[
            Annotated[str, Tag("text")] | Annotated[list[_Text], _PROMPTS, Tag("list")],
            _by_kind(_text_or_list, "a text or a list of parts"),
        ]
        | None
    ) = None

    def plain(self) -> JsonObject:
        """Return the message in the form of a template."""
        message = self.model_dump()
        return plain_message({**message, "content": message["content"] or ""})


class _Prompted(_Form):
    # None is OpenAI's for the beginning of a new document, and so is an empty text here.
    prompt: (
        Annotated[
            Annotated[str, Tag("text")]
            | Annotated[list[str], _PROMPTS, Tag("texts")]
            | Annotated[Ids, Tag("ids")]
            | Annotated[list[Ids], _PROMPTS, Tag("lists")],
            _by_kind(_kind_of_prompt, "a text, a list of texts, a list of ids or a list of such lists"),
        ]
        | None
    ) = None
    messages: Annotated[list[_Message], _PROMPTS] | None = None  # a chat's messages, instead of a prompt
    snapshot: Natural | None = None  # the step of the snapshot that answers; None: the served model

    def prompts(self, tokenizer: Tokenizer, template: Template | None, *, heal: bool = False) -> list[Prompt]:
        """Return the tokens of each prompt, at least one each.

        With `heal`, the last word of a text may get other tokens.

        Raises:
            InputError: there is a chat, but no template for it, or a prompt too; the last message is the
                assistant's; the list of prompts is empty; an id is unknown.
        """
        if self.messages is not None:
            if self.prompt:
                raise InputError("prompt: a chat has messages instead, leave it out")
            if template is None:
                raise InputError("the model was not tuned on examples: it has no template for a chat")
            messages = [message.plain() for message in self.messages]
            if messages and messages[-1]["role"] == "assistant":
                raise InputError("the last message is the assistant's, expected one to reply to")
            return [Prompt(template.prompt(tokenizer, messages))]
        prompts = self._each_prompt()
        if not prompts:
            raise InputError("expected at least one prompt, got an empty list")
        return [_tokenized(tokenizer, prompt, heal) for prompt in prompts]

    def _each_prompt(self) -> Sequence[str | list[int]]:
        """Return the prompts, each as a text or as ids."""
        if self.prompt is None or isinstance(self.prompt, str):
            return [self.prompt or ""]
        ids = [item for item in self.prompt if isinstance(item, int)]
        return [ids] if ids else [item for item in self.prompt if not isinstance(item, int)]


def _tokenized(tokenizer: Tokenizer, prompt: str | list[int], heal: bool) -> Prompt:
    if isinstance(prompt, list):
        tokenizer.decode_bytes(prompt)  # raises for an unknown id
        return Prompt(prompt or [tokenizer.eot])
    return typed_prompt(tokenizer, prompt) if heal else Prompt(tokenizer.encode(prompt) or [tokenizer.eot])


class _IgnoredFields(_Form):
    """Fields of OpenAI's form that cannot change the text. They are ignored.

    So are tools that are offered, as Open WebUI does in every chat: a model may always answer with a text.
    `tool_choice` must not demand a call.
    """

    functions: object = None
    metadata: object = None
    parallel_tool_calls: object = None
    prediction: object = None
    prompt_cache_key: object = None
    prompt_cache_options: object = None
    prompt_cache_retention: object = None
    reasoning_effort: object = None
    safety_identifier: object = None
    service_tier: object = None
    store: object = None
    tools: object = None
    user: object = None


def _refuse_what_asks(value: T) -> T:
    """Accept only a value that asks for nothing: zero, or an empty list, mapping or text."""
    if value:
        raise PydanticCustomError("unsupported", "this is not supported here, leave it out")
    return value


_AsksForNothing = AfterValidator(_refuse_what_asks)


class _UnsupportedFields(_Form):
    """Fields of OpenAI's form that are not supported here. Only values that ask for nothing are accepted."""

    best_of: Literal[1] | None = None
    frequency_penalty: Annotated[float, _AsksForNothing] | None = None
    function_call: Literal["none", "auto"] | None = None
    logit_bias: Annotated[dict[str, object], _AsksForNothing] | None = None
    modalities: list[Literal["text"]] | None = None
    presence_penalty: Annotated[float, _AsksForNothing] | None = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None
    suffix: Annotated[str, _AsksForNothing] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    top_logprobs: Literal[0] | None = None


class CompletionRequest(_Prompted, _IgnoredFields, _UnsupportedFields):
    """The fields of OpenAI's form, then those of this engine. Any other field is an error that names it.

    `Sampling` checks the ranges of its fields.
    """

    model: str | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = Field(default=1, ge=1, lt=2**31)
    stream: bool | None = False
    stream_options: dict[str, bool | None] | None = None
    logprobs: int | None = Field(default=None, ge=0, le=ALTERNATIVES)
    echo: bool | None = False
    stop: (
        Annotated[
            Annotated[Stop, Tag("text")]
            | Annotated[list[Stop], Field(max_length=16, fail_fast=True), Tag("list")],
            _by_kind(_text_or_list, "a text or a list of texts"),
        ]
        | None
    ) = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)

    top_k: Count | None = None  # 0 is off too, as in other servers
    min_p: float | None = None
    repetition_penalty: float | None = None
    # Whether a text prompt may end inside a token, so that its last word may get other tokens. By default it
    # may. The exception is a request for the scores of the prompt and at most one new token: programs that
    # score a text send it.
    heal: bool | None = None

    @field_validator("logprobs", mode="before")
    @classmethod
    def _without(cls, logprobs: object) -> object:
        """Replace False, with which chats ask for no log-probabilities, by None. Refuse True."""
        if logprobs is True:
            raise PydanticCustomError("boolean", "a completion takes a number, and a chat has none")
        return None if logprobs is False else logprobs

    def requests(self, tokenizer: Tokenizer, template: Template | None) -> list[Request]:
        """Make one engine request for each prompt. Raises InputError for values or ids out of range."""
        max_tokens = self._most_new_tokens()
        if not (max_tokens or self.echo):
            raise InputError("max_tokens must be at least 1 without echo, got 0")
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        scores_alone = bool(self.echo) and self.logprobs is not None and max_tokens <= 1
        heal = not scores_alone if self.heal is None else self.heal
        names = {field.name for field in fields(Sampling)}
        given = self.model_dump(include=names, exclude_none=True)
        sampling = Sampling(**{**given, "top_k": self.top_k or None})
        return [
            Request(
                tokens=prompt.tokens,
                healed=prompt.healed,
                max_new_tokens=max_tokens,
                sampling=sampling,
                seed=self.seed,
                samples=self.n or 1,
                end=tokenizer.eot,
                stop=[stop for stop in stops if stop],
                alternatives=self.logprobs,
                echo=bool(self.echo),
            )
            for prompt in self.prompts(tokenizer, template, heal=heal)
        ]

    def _most_new_tokens(self) -> int:
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        if self.max_tokens is not None:
            return self.max_tokens
        return 16 if self.messages is None else 1024


class AttentionRequest(_Prompted):
    """The body of `POST /attention`, with which the page gets the attention weights of the last token."""

    tokens: Ids = []  # they follow the prompt

    def ids(self, tokenizer: Tokenizer, template: Template | None) -> list[int]:
        """Return the ids of the prompt and the tokens.

        Raises InputError for an id outside the vocabulary, and for several prompts.
        """
        tokenizer.decode_bytes(self.tokens)  # raises for an unknown id
        prompt, *others = self.prompts(tokenizer, template)
        if others:
            raise InputError(f"prompt: expected one, got {len(others) + 1}")
        return prompt.tokens + self.tokens


class CopiedRequest(_Form):
    """The body of `POST /copied`, with which the page finds copied passages."""

    tokens: Annotated[list[Natural], Field(max_length=1 << 14, fail_fast=True)]


def log_probabilities(tokenizer: Tokenizer, tokens: Sequence[Token], offset: int) -> JsonObject:
    """Return the field `logprobs` for tokens whose text begins at character `offset` of the choice's text."""

    def name(id_: int) -> str:
        """Return the token's text. Part of a character is written as `bytes:\\xf0\\x9f`, as OpenAI does."""
        data = tokenizer.decode_bytes([id_])
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def top(token: Token) -> dict[str, float] | None:
        """Return the most likely tokens and the chosen one; None for the first token of an echoed prompt."""
        if token.logprobs is None:
            return None
        return {
            name(id_): value for id_, value in (*token.logprobs.likeliest, (token.id, token.logprobs.chosen))
        }

    return {
        "tokens": [name(token.id) for token in tokens],
        "token_logprobs": [token.logprobs and token.logprobs.chosen for token in tokens],
        "top_logprobs": [top(token) for token in tokens],
        "text_offset": list(accumulate((len(token.text) for token in tokens), initial=offset))[:-1],
        "token_ids": [token.id for token in tokens],  # OpenAI has no such field; the page needs it
    }
