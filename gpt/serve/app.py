"""The HTTP application: completions and chats in OpenAI's form, and further routes for the page."""

import asyncio
import json
import os
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import TypeVar

import anyio
import torch
from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, StreamingResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope, Send

from gpt.attention import capture_weights
from gpt.errors import InputError
from gpt.evaluation.copied import Copied
from gpt.generation import Token, for_decoding
from gpt.generation.samples import window_start
from gpt.model import GPT
from gpt.plain import JsonObject
from gpt.serve.engine_thread import EngineThread, Handle, Piece
from gpt.serve.errors import CodedError, error_body, error_reply
from gpt.serve.history import History
from gpt.serve.limits import CALL_COST, RequestLimits, check_key, cost_of, guard
from gpt.serve.requests import AttentionRequest, CompletionRequest, CopiedRequest, log_probabilities
from gpt.share.page import served_page
from gpt.text.template import Template
from gpt.text.tokenizer import Tokenizer
from gpt.weights.checkpoint import RunPart
from gpt.weights.figures import figures_of
from gpt.weights.load import load
from gpt.weights.rounding import WeightPrecision

Result = TypeVar("Result")

_LONG = 1 << 14  # bytes; a larger body counts as long
_LONG_TEXTS = 2  # how many long bodies are worked on at the same time


def create_app(
    model: GPT,
    tokenizer: Tokenizer,
    *,
    name: str = "gpt",
    limits: RequestLimits | None = None,
    api_key: str | None = None,
    template: Template | None = None,
    run: Path | None = None,
    copied: Copied | None = None,
    precision: WeightPrecision | None = None,
    trained: RunPart | None = None,
) -> FastAPI:
    """Make the application that serves a model.

    `app.state.end()` ends it: no more requests are taken, and clients that wait get an error. Raises
    InputError for an API key that clients could not send.

    Args:
        model: the model as `for_decoding` returns it for this `precision`.
        tokenizer: the model's tokenizer.
        name: what clients call the model.
        limits: what clients may ask for; by default `RequestLimits()`.
        api_key: the key that clients must send, if there is one.
        template: the template of the examples that the model was tuned on. Without it there are no chats.
        run: the run whose training the page shows.
        copied: finds what the model copied from its training text, for the page to mark.
        precision: the precision that the model and the run's snapshots compute in.
        trained: the state of the run in the served checkpoint, for the page to show its figures.
    """
    check_key(api_key)
    limits = limits or RequestLimits()
    device = model.token_embedding.weight.device

    def read_snapshot(file: Path) -> EngineThread:
        return EngineThread(for_decoding(load(file)[0].to(device), precision), tokenizer)

    own = EngineThread(model, tokenizer)
    history = History(own, run or Path(os.devnull), read_snapshot, limits.snapshots)
    figures = figures_of(model.num_parameters(), trained)
    service = _Service(tokenizer, name, limits, template, history, copied, figures)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None, None]:
        yield
        history.end()

    # FastAPI's own documentation pages load their scripts from another host.
    app = FastAPI(lifespan=lifespan, openapi_url=None)
    app.get("/")(service.page)
    app.get("/health")(service.health)
    app.get("/v1/models")(service.models)
    app.get("/v1/models/{name:path}")(service.model)
    app.post("/v1/completions")(service.completions)
    app.post("/v1/chat/completions")(service.chat)
    app.get("/about")(service.about)
    app.post("/attention")(service.attention)
    if copied:
        app.post("/copied")(service.find_copied)
    for kind in (InputError, ValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, lambda _, error: error_reply(error))
    app.add_exception_handler(404, _not_found)
    app.add_middleware(guard, api_key=api_key)
    app.state.end = history.end
    app.state.service = service
    return app


@dataclass
class _Service:
    """The handlers of all routes, and their shared state."""

    tokenizer: Tokenizer
    name: str
    limits: RequestLimits
    template: Template | None
    history: History
    copied: Copied | None
    figures: JsonObject

    def __post_init__(self) -> None:
        self.started = int(time.time())
        self.open_cost = 0  # of all open requests together
        self.waiting_bytes = 0  # the size of bodies whose work (to tokenize, to search) waits or runs
        self.long_texts = asyncio.Semaphore(_LONG_TEXTS)

    @contextmanager
    def count_as_open(self, cost: int) -> Iterator[None]:
        """Count a request as open during the block.

        Raises InputError if its cost is over the limit, HTTPException 503 if too many requests are open.
        """
        if cost > self.limits.cost:
            advice = "ask for fewer prompts, completions or tokens, or without echo or logprobs"
            raise InputError(f"the request costs {cost}, expected at most {self.limits.cost}: {advice}")
        if self.open_cost + cost > self.limits.most_open_cost:
            raise HTTPException(503, "too many requests are waiting, try again later")
        self.open_cost += cost
        try:
            yield
        finally:
            self.open_cost -= cost

    async def work_in_thread(self, body: bytes, work: Callable[..., Result], *arguments: object) -> Result:
        """Do work in a thread, so that the event loop goes on. The body's size limits how long it takes.

        Only a few long bodies get a thread at a time, so that short ones and answers find a free one. Raises
        HTTPException 503 if too many bytes wait.
        """
        if self.waiting_bytes + len(body) > self.limits.most_waiting_bytes:
            raise HTTPException(503, "too many long texts are waiting, try again later")
        self.waiting_bytes += len(body)
        try:
            async with self.long_texts if len(body) > _LONG else nullcontext():
                return await asyncio.to_thread(work, *arguments)
        finally:
            self.waiting_bytes -= len(body)

    async def page(self) -> HTMLResponse:
        page, policy = served_page()
        return HTMLResponse(page, headers={"content-security-policy": policy})

    async def health(self) -> dict[str, str]:
        return {"status": "ok"}

    async def models(self) -> JsonObject:
        return {"object": "list", "data": [await self.model(self.name)]}

    def check_name(self, name: str) -> None:
        """Raise HTTPException 404 for the name of another model."""
        if name != self.name:
            message = f"there is no model {name!r:.80}, expected {self.name!r}"
            raise CodedError(404, message, "model_not_found")

    async def model(self, name: str) -> JsonObject:
        self.check_name(name)
        return {"id": name, "object": "model", "created": self.started, "owned_by": "gpt"}

    def about(self) -> JsonObject:
        marks = {"chat": self.template is not None, "copied": self.copied is not None}
        return {"id": self.name, "figures": self.figures, **marks, **self.history.curve()}

    @contextmanager
    def end_with_client(self, request: Request, deadline: float) -> Iterator[None]:
        """Cancel the block when its client disconnects, or at a time of the event loop's clock.

        Raises HTTPException 499 or 504 then.
        """

        def leave(received: asyncio.Future[Message]) -> None:
            if not received.cancelled():
                scope.cancel()

        disconnected = asyncio.ensure_future(request.receive())  # the body was read, so nothing else comes
        disconnected.add_done_callback(leave)
        with anyio.CancelScope(deadline=deadline) as scope:
            try:
                yield
            finally:
                disconnected.cancel()
        if scope.cancelled_caught:
            late = asyncio.get_running_loop().time() >= deadline
            raise self.too_late() if late else HTTPException(499, "the client disconnected")

    def too_late(self) -> HTTPException:
        """Return the error for a request that took more than its time."""
        return HTTPException(504, f"the request took more than {self.limits.max_seconds} s")

    async def attention(self, request: Request) -> Response:
        body = await self.limits.read_body(request)
        deadline = asyncio.get_running_loop().time() + self.limits.max_seconds
        form = AttentionRequest.model_validate_json(body)
        ids = await self.work_in_thread(body, form.ids, self.tokenizer, self.template)
        with self.count_as_open(CALL_COST), self.end_with_client(request, deadline):
            engine = await self.history.engine(form.snapshot)
            seen = ids[window_start(len(ids), engine.model.config.context_length) :]  # as in generation
            return _json(await engine.call(lambda: self.last_token_attention(engine.model, seen)))

    @torch.inference_mode()
    def last_token_attention(self, model: GPT, seen: list[int]) -> str:
        """Return JSON with the text of each of T tokens, and the last one's weights (layers, heads, T).

        The T tokens are all that the model has `seen`, or the last ones of them, at their own positions. The
        weights have four decimals.
        """
        tokens = seen[-self.limits.attention_tokens :]
        device = model.token_embedding.weight.device
        positions = torch.arange(len(seen) - len(tokens), len(seen), device=device)[None]  # (1, T)
        with capture_weights(model) as captured:
            model.features(torch.tensor([tokens], device=device), positions=positions)
        weights = torch.stack([layer[0, :, -1] for layer in captured.values()])  # (layers, heads, T)
        texts = [self.tokenizer.decode([token]) for token in tokens]
        rounded = [[[round(weight, 4) for weight in head] for head in layer] for layer in weights.tolist()]
        return json.dumps({"tokens": texts, "weights": rounded})

    async def find_copied(self, request: Request) -> JsonObject:
        body = await self.limits.read_body(request)
        form = CopiedRequest.model_validate_json(body)
        assert self.copied
        return {"runs": await self.work_in_thread(body, self.copied.runs, form.tokens)}

    async def completions(self, request: Request) -> Response:
        body = await self.limits.read_body(request)
        return await self.answer(CompletionRequest.model_validate_json(body), body, request)

    async def chat(self, request: Request) -> Response:
        body = await self.limits.read_body(request)
        form = CompletionRequest.model_validate_json(body)
        if form.logprobs is not None:
            raise InputError("logprobs are for completions: a chat has none")
        if form.echo:
            raise InputError("echo is for completions: a chat has none")
        form.messages = form.messages or []
        return await self.answer(form, body, request, chat=True)

    async def answer(
        self, form: CompletionRequest, body: bytes, request: Request, chat: bool = False
    ) -> Response:
        """Answer a request.

        The block of `held` ends what the request holds: its cost, the engine's work, a timer. That is when
        the whole answer is ready. A stream takes these over, and ends them when it ends itself.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.limits.max_seconds
        if form.model is not None:
            self.check_name(form.model)
        requests = await self.work_in_thread(body, form.requests, self.tokenizer, self.template)
        with ExitStack() as held:
            held.enter_context(self.count_as_open(cost_of(requests)))
            with self.end_with_client(request, deadline):
                engine = await self.history.engine(form.snapshot)
                handle = engine.submit(requests)
                held.callback(engine.cancel, handle)
                answer = _Answer(self.name, self.tokenizer, handle, form, chat)
                if not form.stream:
                    return _json(await answer.whole())
            held.callback(loop.call_at(deadline, handle.put, self.too_late()).cancel)
            most = deadline - loop.time() + self.limits.last_seconds
            return _EventStream(answer, held.pop_all(), most)


def _not_found(request: Request, error: Exception) -> Response:
    """Answer 404. For an unknown path, name those of clients: many give a base URL without /v1."""
    if isinstance(error, HTTPException) and error.detail == HTTPStatus.NOT_FOUND.phrase:
        expected = "/v1/chat/completions, /v1/completions or /v1/models"
        error = HTTPException(404, f"there is no path {request.url.path!r:.80}, expected {expected}")
    return error_reply(error)


def _json(body: str) -> Response:
    return Response(body, media_type="application/json")


class _EventStream(StreamingResponse):
    """A stream of events. It ends, with what it holds, if the client is gone or takes too long to read."""

    def __init__(self, answer: "_Answer", held: ExitStack, seconds: float) -> None:
        super().__init__(answer.events(), media_type="text/event-stream")
        self.held = held
        self.seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self.held, anyio.move_on_after(self.seconds):
            await super().__call__(scope, receive, send)


@dataclass
class _Choice:
    """A choice of an answer: how much of it the client has."""

    index: int
    entries: int = 0
    length: int = 0  # characters of its text


class _Answer:
    """The answer to one request for a completion or a reply in a chat."""

    def __init__(
        self, name: str, tokenizer: Tokenizer, handle: Handle, form: CompletionRequest, chat: bool
    ) -> None:
        self.tokenizer = tokenizer
        self.handle = handle
        self.form = form
        self.chat = chat
        self.choices = [_Choice(index) for index in range(handle.unread)]
        self.new_tokens = 0
        kind = "text_completion"
        if chat:
            kind = "chat.completion.chunk" if form.stream else "chat.completion"
        self.head = {"id": uuid.uuid4().hex, "object": kind, "created": int(time.time()), "model": name}

    async def whole(self) -> str:
        """Wait for all tokens, and return the JSON of the whole answer."""
        tokens: list[list[Token]] = [[] for _ in self.choices]
        async for index, token in self._tokens():
            tokens[index].append(token)
        # The JSON of a large answer takes seconds. In a thread it does not delay other clients' tokens.
        return await asyncio.to_thread(self._body, tokens)

    def _body(self, tokens: list[list[Token]]) -> str:
        choices = [self._entry(choice, some) for choice, some in zip(self.choices, tokens, strict=True)]
        return json.dumps({**self.head, "choices": choices, "usage": self._usage()}, ensure_ascii=False)

    async def events(self) -> AsyncGenerator[str, None]:
        """Yield the JSON of each token that has text, as server-sent events."""
        try:
            async for index, token in self._tokens():
                if token.text or token.finished or self.form.logprobs is not None:
                    yield _event({**self.head, "choices": [self._entry(self.choices[index], [token])]})
            if (self.form.stream_options or {}).get("include_usage"):
                yield _event({**self.head, "choices": [], "usage": self._usage()})
        except HTTPException as error:  # the status was sent already, so the error is sent as an event
            yield _event(error_body(error))
        yield "data: [DONE]\n\n"

    async def _tokens(self) -> AsyncGenerator[Piece, None]:
        """Yield each token with the index of its choice. Other requests may run between two tokens."""
        while self.handle.unread:
            for index, token in await self.handle.next():
                await asyncio.sleep(0)
                self.new_tokens += not token.echoed
                yield index, token

    def _entry(self, choice: _Choice, tokens: list[Token]) -> JsonObject:
        """Return the entry of `choices` for new tokens. They follow those of the choice's earlier entries."""
        text = "".join(token.text for token in tokens)
        logprobs = None
        if self.form.logprobs is not None:
            logprobs = log_probabilities(self.tokenizer, tokens, choice.length)
            if choice.entries == 0:
                # OpenAI has no such field. The page needs it, as the prompt's last word may get other tokens.
                sample = tokens[0].sample
                logprobs["prompt_token_ids"] = sample.tokens[: sample.prompt_length]
        # Only in the first entry with a text, as clients join all entries.
        role = {} if choice.length else {"role": "assistant"}
        choice.entries += 1
        choice.length += len(text)
        entry = {"index": choice.index, "logprobs": logprobs, "finish_reason": tokens[-1].finished}
        if not self.chat:
            return {"text": text, **entry}
        return {**entry, "delta" if self.form.stream else "message": {**role, "content": text}}

    def _usage(self) -> dict[str, int]:
        read = sum(len(request.tokens) for request in self.handle.requests)
        written = self.new_tokens
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def _event(value: JsonObject) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"
