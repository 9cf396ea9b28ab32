"""The HTTP application: completions in the OpenAI form, the page, and what tells how it is doing."""

import asyncio
import itertools
import json
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, StreamingResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from gpt.errors import InputError
from gpt.model import GPT
from gpt.serve.attention import attention_of_the_last
from gpt.serve.engine_thread import Batcher, Broken, Busy, Piece, Ticket
from gpt.serve.limits import Limits
from gpt.serve.metrics import Metrics
from gpt.serve.middleware import Guard, TooLarge, error_body
from gpt.serve.requests import AttentionRequest, Choice, CompletionRequest
from gpt.tokenizer import Tokenizer

Form = TypeVar("Form", bound=BaseModel)

_LOOK = 0.2
"""Seconds after which a handler that waits for a token looks whether its client is still there."""


class Gone(Exception):
    """The client went away."""


def create_app(
    model: GPT,
    tokenizer: Tokenizer,
    *,
    name: str = "gpt",
    limits: Limits | None = None,
    api_key: str | None = None,
) -> FastAPI:
    """The application; its engine runs while its lifespan does.

    Args:
        model: any GPT; best one from `for_decoding`.
        tokenizer: the model's.
        name: what clients call the model.
        limits: what a client may ask for.
        api_key: what clients must send, if anything.
    """
    limits = limits or Limits()
    batcher = Batcher(model, tokenizer, max_samples=limits.running, max_waiting=limits.waiting)
    service = _Service(batcher, tokenizer, name, limits)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        with batcher:
            yield

    # FastAPI's own documentation pages take their scripts from another host.
    app = FastAPI(title="gpt serve", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_api_route("/", service.page, methods=["GET"])
    app.add_api_route("/health", service.health, methods=["GET"])
    app.add_api_route("/metrics", service.metrics_page, methods=["GET"])
    app.add_api_route("/v1/models", service.models, methods=["GET"])
    app.add_api_route("/v1/completions", service.completions, methods=["POST"], response_model=None)
    app.add_api_route("/attention", service.attention, methods=["POST"])
    for error, status, code in (
        (InputError, 400, "invalid_value"),
        (TooLarge, 413, "request_too_large"),
        (Busy, 503, "busy"),
        (Broken, 500, "internal_error"),
        (TimeoutError, 504, "timeout"),
        (Gone, 499, "client_gone"),
        (HTTPException, 0, "http_error"),
        (Exception, 500, "internal_error"),
    ):
        app.add_exception_handler(error, service.answer_with(status, code))
    app.add_middleware(Guard, body_bytes=limits.body_bytes, api_key=api_key)
    app.state.batcher = batcher
    return app


class _Service:
    """The handlers, and what they share."""

    def __init__(self, batcher: Batcher, tokenizer: Tokenizer, name: str, limits: Limits) -> None:
        self.batcher, self.tokenizer, self.name, self.limits = batcher, tokenizer, name, limits
        self.metrics, self.started = Metrics(), int(time.time())

    async def page(self) -> HTMLResponse:
        text = files("gpt.serve").joinpath("page.html").read_text(encoding="utf-8")
        # Nothing from other hosts, and nothing that a generated text could smuggle in.
        policy = (
            "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
            "img-src data:; connect-src 'self'"
        )
        return HTMLResponse(text, headers={"content-security-policy": policy})

    async def health(self) -> dict[str, str]:
        return {"status": "ok"}

    async def metrics_page(self) -> PlainTextResponse:
        return PlainTextResponse(self.metrics.text(self.batcher.running, self.batcher.open))

    async def models(self) -> dict[str, Any]:
        entry = {"id": self.name, "object": "model", "created": self.started, "owned_by": "gpt"}
        return {"object": "list", "data": [entry]}

    async def attention(self, request: Request) -> dict[str, Any]:
        form = await _read(request, AttentionRequest)
        tokens = self.tokenizer.encode(form.prompt) + form.tokens
        self.tokenizer.decode_bytes(tokens)  # refuses an id outside the vocabulary
        tokens = tokens[-min(self.limits.attention_tokens, self.batcher.model.config.context_length) :]
        return await self.batcher.call(
            lambda: attention_of_the_last(self.batcher.model, self.tokenizer, tokens or [self.tokenizer.eot])
        )

    async def completions(self, request: Request) -> Response:
        started = time.perf_counter()
        form = await _read(request, CompletionRequest)
        if form.model != self.name:
            raise HTTPException(404, f"there is no model {form.model!r}, expected {self.name!r}")
        asked = form.requests(self.tokenizer, self.limits)
        tickets: list[Ticket] = []
        try:
            for one in asked:
                tickets.append(self.batcher.submit(one, form.stops))
        except Busy:
            self._cancel(tickets)
            raise
        answer = _Answer(self, form, tickets, request, started)
        if form.stream:
            return StreamingResponse(answer.stream(), media_type="text/event-stream")
        return JSONResponse(await answer.whole())

    def answer_with(self, status: int, code: str) -> Any:
        """A handler that turns an exception into an error in the OpenAI form, without a traceback."""

        async def handle(_: Request, error: Exception) -> JSONResponse:
            given = error.status_code if isinstance(error, HTTPException) else status
            self.metrics.requests[given] += 1
            messages: dict[type[Exception], str] = {
                TooLarge: f"the body is over {self.limits.body_bytes} bytes",
                Busy: "too many requests are waiting, try again later",
                TimeoutError: f"the request took more than {self.limits.seconds} s",
                HTTPException: getattr(error, "detail", ""),
                InputError: " ".join(str(error).split()),
            }
            message = next(
                (text for kind, text in messages.items() if isinstance(error, kind)), "the server failed"
            )
            headers = {"retry-after": "1"} if given == 503 else None
            return JSONResponse(error_body(message, code, given), given, headers)

        return handle

    def _cancel(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            self.batcher.cancel(ticket)


class _Answer:
    """Follows the tickets of one request to their ends."""

    def __init__(
        self,
        service: _Service,
        form: CompletionRequest,
        tickets: list[Ticket],
        request: Request,
        started: float,
    ) -> None:
        self.service, self.form, self.tickets, self.request = service, form, tickets, request
        self.started, self.deadline = started, started + service.limits.seconds
        self.head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.name,
        }
        first = list(itertools.accumulate((len(ticket.texts) for ticket in tickets), initial=0))
        self.first = dict(zip(tickets, first, strict=False))  # the index of each ticket's first choice
        self.choices = [Choice(index, service.tokenizer) for index in range(first[-1])]
        self.generated = 0

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        pieces: list[list[Piece]] = [[] for _ in self.choices]
        async for index, piece in self._pieces():
            pieces[index].append(piece)
        entries = [choice.entry(some) for choice, some in zip(self.choices, pieces, strict=True)]
        return {**self.head, "choices": entries, "usage": self._usage()}

    async def stream(self) -> AsyncIterator[str]:
        """The answer as server-sent events."""
        try:
            async for index, piece in self._pieces():
                if piece.text or piece.finished or piece.token.log_probability is not None:
                    yield _event({**self.head, "choices": [self.choices[index].entry([piece])]})
            for choice in self.choices if self.form.max_tokens == 0 else ():
                yield _event({**self.head, "choices": [choice.entry([])]})
            if (self.form.stream_options or {}).get("include_usage"):
                yield _event({**self.head, "choices": [], "usage": self._usage()})
            yield "data: [DONE]\n\n"
        except Gone:
            return
        except (Broken, TimeoutError) as error:  # the status is long sent, so the error is an event
            status, code = (504, "timeout") if isinstance(error, TimeoutError) else (500, "internal_error")
            yield _event(error_body("the request was broken off", code, status))

    async def _pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """The pieces of all tickets as they come, each with the index of its choice; then the books are kept.

        Raises:
            Gone: the client went away.
            TimeoutError: the time is up.
            Broken: the engine failed.
        """
        status, metrics = 499, self.service.metrics
        waits = {asyncio.ensure_future(ticket.next()): ticket for ticket in self.tickets if ticket.left}
        try:
            while waits:
                done, _ = await asyncio.wait(waits, timeout=_LOOK, return_when=asyncio.FIRST_COMPLETED)
                if time.perf_counter() > self.deadline:
                    status = 504
                    raise TimeoutError
                if await self.request.is_disconnected():
                    raise Gone
                for wait in done:
                    ticket, piece = waits.pop(wait), wait.result()
                    if self.generated == 0:
                        metrics.observe("gpt_first_token_seconds", time.perf_counter() - self.started)
                    self.generated += 1
                    ticket.left -= piece.finished is not None
                    if ticket.left:
                        waits[asyncio.ensure_future(ticket.next())] = ticket
                    yield self.first[ticket] + piece.index, piece
            status = 200
        except Broken:
            status = 500
            raise
        finally:
            for wait in waits:
                wait.cancel()
            self.service._cancel(self.tickets)
            if self.form.stream or status == 200:  # else it is counted with the error's answer
                metrics.requests[status] += 1
            metrics.prompt_tokens += sum(len(ticket.request.tokens) for ticket in self.tickets)
            metrics.generated_tokens += self.generated
            metrics.observe("gpt_request_seconds", time.perf_counter() - self.started)

    def _usage(self) -> dict[str, int]:
        prompt = sum(len(ticket.request.tokens) for ticket in self.tickets)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.generated,
            "total_tokens": prompt + self.generated,
        }


async def _read(request: Request, form: type[Form]) -> Form:
    """The body as the form.

    Raises:
        InputError: it is not; the message names the field.
        HTTPException: it does not say that it is JSON. A page of another site cannot say so unasked.
    """
    if request.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, "expected content-type application/json")
    try:
        return form.model_validate_json(await request.body())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InputError(f"{where or 'the body'}: {first['msg']}") from None


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"
