"""The HTTP application: completions in the OpenAI form, the page, health and metrics."""

import asyncio
import json
import os
import time
import uuid
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, StreamingResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from gpt.attention import capture_weights
from gpt.errors import InputError
from gpt.generation import Token
from gpt.model import GPT
from gpt.serve.engine_thread import EngineThread, Handle, Result
from gpt.serve.errors import error_body, error_reply
from gpt.serve.history import History
from gpt.serve.limits import Limits, guard
from gpt.serve.metrics import Metrics
from gpt.serve.requests import AttentionRequest, ChatRequest, CompletionRequest, log_probabilities
from gpt.text.template import Template
from gpt.text.tokenizer import Tokenizer
from gpt.weights.load import load


def create_app(
    model: GPT,
    tokenizer: Tokenizer,
    *,
    name: str = "gpt",
    limits: Limits | None = None,
    api_key: str | None = None,
    template: Template | None = None,
    run: Path | None = None,
) -> FastAPI:
    """The application that serves a model under a `name`; its engine is `app.state.engine`.

    Clients must send the `api_key`, if there is one. Without the `template` of the examples that the model
    was tuned on there are no chat completions. The page shows the training of the `run`.
    """
    limits = limits or Limits()
    engine, device = EngineThread(model, tokenizer, limits), model.token_embedding.weight.device

    def read_snapshot(file: Path) -> EngineThread:
        return EngineThread(load(file)[0].to(device), tokenizer, limits)

    history = History(engine, run or Path(os.devnull), read_snapshot, limits.snapshots)
    service = _Service(engine, tokenizer, name, limits, template, history)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None, None]:
        yield
        for one in (engine, *history.engines.values()):
            one.stop()

    # FastAPI's own documentation pages load their scripts from another host.
    app = FastAPI(lifespan=lifespan, openapi_url=None)
    app.add_api_route("/", service.page, methods=["GET"])
    app.add_api_route("/health", service.health, methods=["GET"])
    app.add_api_route("/metrics", service.metrics_page, methods=["GET"])
    app.add_api_route("/v1/models", service.models, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", service.model, methods=["GET"])
    app.add_api_route("/v1/chat/completions", service.chat, methods=["POST"])
    app.add_api_route("/v1/completions", service.completions, methods=["POST"])
    app.add_api_route("/training", history.curves, methods=["GET"])
    app.add_api_route("/attention", service.attention, methods=["POST"])
    for kind in (InputError, ValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, service.error)
    app.add_middleware(guard, api_key=api_key)
    app.state.engine = engine
    return app


@dataclass
class _Service:
    """The handlers and their shared state."""

    engine: EngineThread
    tokenizer: Tokenizer
    name: str
    limits: Limits
    template: Template | None
    history: History

    def __post_init__(self) -> None:
        self.metrics, self.started = Metrics(), int(time.time())

    async def page(self) -> HTMLResponse:
        # No other hosts, and no scripts or pictures from generated text.
        policy = (
            "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
            "img-src data:; connect-src 'self'"
        )
        page = Path(__file__).with_name("page.html").read_bytes()
        return HTMLResponse(page, headers={"content-security-policy": policy})

    async def health(self) -> JSONResponse:
        problem = self.engine.problem
        return JSONResponse({"status": problem or "ok"}, 503 if problem else 200)

    async def metrics_page(self) -> PlainTextResponse:
        engines = (self.engine, *self.history.engines.values())
        running, open_ = sum(one.running for one in engines), sum(one.open for one in engines)
        return PlainTextResponse(self.metrics.text(running, open_))

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [await self.model(self.name)]}

    async def model(self, name: str) -> dict[str, Any]:
        if name != self.name:
            raise HTTPException(404, f"there is no model {name!r:.80}, expected {self.name!r}")
        return {"id": name, "object": "model", "created": self.started, "owned_by": "gpt"}

    async def attention(self, request: Request) -> dict[str, Any]:
        started = time.perf_counter()
        form = AttentionRequest.model_validate_json(await self.limits.read_body(request))
        ids = await asyncio.to_thread(form.ids, self.tokenizer)
        engine = await self.wait(self.history.engine(form.snapshot), request, started)
        most = min(self.limits.attention_tokens, engine.model.config.context_length)
        tokens = ids[-most:]
        call = engine.call(lambda: self.last_token_attention(engine.model, tokens))
        return await self.wait(call, request, started)

    @torch.inference_mode()
    def last_token_attention(self, model: GPT, tokens: list[int]) -> dict[str, Any]:
        """The text of T tokens, and the weights (layers, heads, T) of the last one, rounded."""
        with capture_weights(model) as captured:
            model.features(torch.tensor([tokens], device=model.token_embedding.weight.device))
        weights = torch.stack([layer[0, :, -1] for layer in captured.values()])  # (layers, heads, T)
        return {
            "tokens": [self.tokenizer.decode([token]) for token in tokens],
            "weights": [[[round(w, 4) for w in head] for head in layer] for layer in weights.tolist()],
        }

    async def chat(self, request: Request) -> Response:
        if self.template is None:
            raise InputError(f"{self.name!r} was not tuned on examples: it has no template for a chat")
        return await self.answer(request, ChatRequest)

    async def completions(self, request: Request) -> Response:
        return await self.answer(request, CompletionRequest)

    async def answer(self, request: Request, kind: type[CompletionRequest]) -> Response:
        started = time.perf_counter()
        form = kind.model_validate_json(await self.limits.read_body(request))
        await self.model(self.name if form.model is None else form.model)
        # Long texts take a while to encode, which must not hold up the event loop.
        requests = await asyncio.to_thread(form.requests, self.tokenizer, self.limits, self.template)
        engine = await self.wait(self.history.engine(form.snapshot), request, started)
        answer = _Answer(self, engine, engine.submit(requests), form, request, started)
        if not form.stream:
            return JSONResponse(await answer.complete())
        return _EventStream(answer)

    async def wait(self, result: Coroutine[Any, Any, Result], request: Request, started: float) -> Result:
        """Wait for a result while the client is connected and in time."""
        left = started + self.limits.seconds - time.perf_counter()
        task, gone = asyncio.create_task(result), asyncio.ensure_future(request.receive())
        try:
            await asyncio.wait([task, gone], timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if gone.done():
                raise HTTPException(499, "the client disconnected")
            raise HTTPException(504, f"the request took more than {self.limits.seconds} s")
        finally:
            task.cancel()
            gone.cancel()

    async def error(self, _: Request, error: Exception) -> JSONResponse:
        reply = error_reply(error)
        self.metrics.requests[reply.status_code] += 1
        return reply


class _EventStream(StreamingResponse):
    """Stops the work on an answer at once when the client is gone, also before the first event is sent."""

    def __init__(self, answer: "_Answer") -> None:
        super().__init__(answer.events(), media_type="text/event-stream")
        self.answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self.body_iterator):  # type: ignore[type-var]
                await super().__call__(scope, receive, send)
        finally:
            self.answer.engine.cancel(self.answer.handle)


@dataclass
class _Answer:
    """The answer to one request for a completion or a reply in a chat."""

    service: _Service
    engine: EngineThread
    handle: Handle
    form: CompletionRequest
    request: Request
    started: float

    def __post_init__(self) -> None:
        requests, self.chat = self.handle.requests, isinstance(self.form, ChatRequest)
        self.lengths = [0] * sum(one.samples for one in requests)  # of the texts so far
        self.prompt_tokens, self.new_tokens = sum(len(one.tokens) for one in requests), 0
        kind, prefix = ("chat.completion", "chatcmpl") if self.chat else ("text_completion", "cmpl")
        kind += ".chunk" if self.chat and self.form.stream else ""
        name, created = f"{prefix}-{uuid.uuid4().hex}", int(time.time())
        self.head = {"id": name, "object": kind, "created": created, "model": self.service.name}

    async def complete(self) -> dict[str, Any]:
        tokens: list[list[Token]] = [[] for _ in self.lengths]
        async for index, token in self._tokens():
            tokens[index].append(token)
        choices = [self._choice(index, some) for index, some in enumerate(tokens)]
        return {**self.head, "choices": choices, "usage": self._usage()}

    async def events(self) -> AsyncGenerator[str, None]:
        try:
            async for index, token in self._tokens():
                if token.text or token.finished or self.form.logprobs is not None:
                    yield _event({**self.head, "choices": [self._choice(index, [token])]})
            if not (self.new_tokens or self.form.echo):  # no tokens were requested
                for index in range(len(self.lengths)):
                    yield _event({**self.head, "choices": [self._choice(index, [])]})
            if (self.form.stream_options or {}).get("include_usage"):
                yield _event({**self.head, "choices": [], "usage": self._usage()})
            yield "data: [DONE]\n\n"
        except (HTTPException, InputError) as error:  # the status is already sent, so the error is an event
            yield _event(error_body(error)[0])

    async def _tokens(self) -> AsyncGenerator[tuple[int, Token], None]:
        """Yield each token with the index of its choice, then update the metrics."""
        status, metrics, last = 499, self.service.metrics, dict[int, float]()
        try:
            while self.handle.unread:
                index, token = await self.service.wait(self.handle.next(), self.request, self.started)
                if not token.echoed:
                    now = time.perf_counter()
                    if self.new_tokens == 0:
                        metrics.first_token_time.observe(now - self.started)
                    if index in last:
                        metrics.token_time.observe(now - last[index])
                    last[index] = now
                    self.new_tokens += 1
                yield index, token
            status = 200
        except (HTTPException, InputError) as error:
            _, status = error_body(error)
            raise
        finally:
            self.engine.cancel(self.handle)
            if self.form.stream or status == 200:  # other errors are counted where they are answered
                metrics.requests[status] += 1
            metrics.prompt_tokens += self.prompt_tokens
            metrics.generated_tokens += self.new_tokens
            metrics.request_time.observe(time.perf_counter() - self.started)

    def _choice(self, index: int, tokens: list[Token]) -> dict[str, Any]:
        """The entry of `choices` for the tokens after those of earlier entries; without any, a text ended."""
        text, before = "".join(token.text for token in tokens), self.lengths[index]
        self.lengths[index] += len(text)
        logprobs: dict[str, Any] | None = None
        if self.form.logprobs is not None:
            logprobs = log_probabilities(self.service.tokenizer, tokens, before)
        finish = tokens[-1].finished if tokens else "length"
        choice = {"index": index, "logprobs": logprobs, "finish_reason": finish}
        if not self.chat:
            return {"text": text, **choice}
        role = {} if before else {"role": "assistant"}  # in the first entry alone: clients join the texts
        return {**choice, "delta" if self.form.stream else "message": {**role, "content": text}}

    def _usage(self) -> dict[str, int]:
        read, written = self.prompt_tokens, self.new_tokens
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"
