"""The HTTP application: completions in the OpenAI form, the page, health and metrics."""

import asyncio
import json
import os
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import torch
from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, StreamingResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from gpt.attention import capture_weights
from gpt.data.copied import Copied
from gpt.errors import InputError
from gpt.generation import Token
from gpt.model import GPT
from gpt.serve.engine_thread import CALL_COST, EngineThread, Handle, Piece, cost
from gpt.serve.errors import error_body, error_reply
from gpt.serve.history import History
from gpt.serve.limits import Limits, guard
from gpt.serve.requests import (
    AttentionRequest,
    ChatRequest,
    CompletionRequest,
    ConversationRequest,
    IdsRequest,
    log_probabilities,
)
from gpt.share.page import served_page
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
    copied: Copied | None = None,
) -> FastAPI:
    """The application that serves a model under a `name`.

    Its engine is `app.state.engine`; `app.state.end()` takes nothing more and tells the clients that wait.

    Clients must send the `api_key`, if there is one. Without the `template` of the examples that the model
    was tuned on there are no chat completions. The page shows the training of the `run`, and marks what the
    model has `copied`.
    """
    limits, device = limits or Limits(), model.token_embedding.weight.device

    def read_snapshot(file: Path) -> EngineThread:
        return EngineThread(load(file)[0].to(device), tokenizer, limits)

    engine = EngineThread(model, tokenizer, limits)
    history = History(engine, run or Path(os.devnull), read_snapshot, limits.snapshots)
    service = _Service(engine, tokenizer, name, limits, template, history)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None, None]:
        yield
        for one in service.engines:
            one.stop()

    # FastAPI's own documentation pages load their scripts from another host.
    app = FastAPI(lifespan=lifespan, openapi_url=None)
    app.get("/")(service.page)
    app.get("/health")(service.health)
    app.get("/metrics")(service.metrics_page)
    app.get("/v1/models")(service.models)
    app.get("/v1/models/{name:path}")(service.model)
    app.post("/v1/chat/completions")(service.chat)
    app.post("/v1/completions")(service.completions)
    app.get("/training")(history.curve)
    about = {"id": name, "chat": template is not None, "copied": copied is not None}
    app.get("/about")(lambda: about)
    app.post("/attention")(service.attention)
    if template:
        app.post("/conversation")(partial(service.conversation, template))
    if copied:
        app.post("/copied")(partial(service.find_copied, copied))
    for kind in (InputError, ValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, service.error)
    app.add_middleware(guard, api_key=api_key)
    app.state.engine, app.state.end = engine, service.end
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
        self.started = int(time.time())
        self.counts = defaultdict[str, float](int)  # what /metrics shows

    async def page(self) -> HTMLResponse:
        page, policy = served_page()
        return HTMLResponse(page, headers={"content-security-policy": policy})

    async def health(self) -> JSONResponse:
        problem = self.engine.problem
        return JSONResponse({"status": problem or "ok"}, 503 if problem else 200)

    @property
    def engines(self) -> list[EngineThread]:
        return [self.engine, *self.history.engines.values()]

    def end(self) -> None:
        for engine in self.engines:
            engine.end()

    def admit(self, cost: int) -> None:
        """HTTPException 503 where there is no room for one more that costs so much."""
        if sum(one.cost for one in self.engines) + cost > self.limits.open_cost:
            raise HTTPException(503, "too many requests are waiting, try again later")

    async def metrics_page(self) -> PlainTextResponse:
        gauges = {
            "open_requests": sum(one.open for one in self.engines),
            "running_samples": sum(one.running for one in self.engines),
        }
        values = {**gauges, **self.counts}
        return PlainTextResponse("".join(f"gpt_{name} {value}\n" for name, value in sorted(values.items())))

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [await self.model(self.name)]}

    async def model(self, name: str) -> dict[str, Any]:
        if name != self.name:
            raise HTTPException(404, f"there is no model {name!r:.80}, expected {self.name!r}")
        return {"id": name, "object": "model", "created": self.started, "owned_by": "gpt"}

    async def attention(self, request: Request) -> Response:
        form = AttentionRequest.model_validate_json(await self.limits.read_body(request))
        return await self.wait(self.last_attention(form), request)

    async def last_attention(self, form: AttentionRequest) -> Response:
        ids = await asyncio.to_thread(form.ids, self.tokenizer)
        engine = await self.history.engine(form.snapshot)
        self.admit(CALL_COST)
        tokens = ids[-min(self.limits.attention_tokens, engine.model.config.context_length) :]
        return _json(await engine.call(lambda: self.last_token_attention(engine.model, tokens)))

    @torch.inference_mode()
    def last_token_attention(self, model: GPT, tokens: list[int]) -> str:
        """JSON: the text of T tokens, and the weights (layers, heads, T) of the last one, rounded."""
        with capture_weights(model) as captured:
            model.features(torch.tensor([tokens], device=model.token_embedding.weight.device))
        weights = torch.stack([layer[0, :, -1] for layer in captured.values()])  # (layers, heads, T)
        texts = [self.tokenizer.decode([token]) for token in tokens]
        rounded = [[[round(w, 4) for w in head] for head in layer] for layer in weights.tolist()]
        return json.dumps({"tokens": texts, "weights": rounded})

    async def find_copied(self, copied: Copied, request: Request) -> dict[str, Any]:
        form = IdsRequest.model_validate_json(await self.limits.read_body(request))
        return {"runs": await asyncio.to_thread(copied.runs, form.ids(self.tokenizer))}

    async def conversation(self, template: Template, request: Request) -> dict[str, Any]:
        form = ConversationRequest.model_validate_json(await self.limits.read_body(request))
        return {"tokens": await asyncio.to_thread(form.ids, self.tokenizer, template)}

    async def chat(self, request: Request) -> Response:
        if self.template is None:
            raise InputError(f"{self.name!r} was not tuned on examples: it has no template for a chat")
        return await self.answer(request, ChatRequest)

    async def completions(self, request: Request) -> Response:
        return await self.answer(request, CompletionRequest)

    async def answer(self, request: Request, kind: type[CompletionRequest]) -> Response:
        form = kind.model_validate_json(await self.limits.read_body(request))
        await self.model(self.name if form.model is None else form.model)
        return await self.wait(self.complete(form), request)

    async def complete(self, form: CompletionRequest) -> Response:
        started = time.perf_counter()
        # Long texts take a while to encode, which must not hold up the event loop.
        requests = await asyncio.to_thread(form.requests, self.tokenizer, self.limits, self.template)
        engine = await self.history.engine(form.snapshot)
        self.admit(cost(requests))
        answer = _Answer(self, engine, engine.submit(requests), form, started)
        return _EventStream(answer) if form.stream else _json(await answer.complete())

    async def wait(self, response: Coroutine[Any, Any, Response], request: Request) -> Response:
        """Wait for a response while the client is connected and in time."""
        task, gone = asyncio.create_task(response), asyncio.ensure_future(request.receive())
        try:
            await asyncio.wait([task, gone], timeout=self.limits.seconds, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise HTTPException(499, "the client disconnected") if gone.done() else self.late()
        finally:
            task.cancel()
            gone.cancel()
            await asyncio.wait([task, gone])  # so that the work has been stopped

    def late(self) -> HTTPException:
        return HTTPException(504, f"the request took more than {self.limits.seconds} s")

    async def error(self, _: Request, error: Exception) -> JSONResponse:
        reply = error_reply(error)
        self.count(reply.status_code)
        return reply

    def count(self, status: int) -> None:
        """Count a request; 499: the client disconnected."""
        self.counts[f'requests_total{{status="{status}"}}'] += 1


def _json(body: str) -> Response:
    return Response(body, media_type="application/json")


class _EventStream(StreamingResponse):
    """Stops the work on an answer at once when the client is gone, and when it takes too long to read."""

    def __init__(self, answer: "_Answer") -> None:
        super().__init__(answer.events(), media_type="text/event-stream")
        self.answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        limits = self.answer.service.limits
        try:
            with anyio.move_on_after(limits.seconds + limits.last_seconds):
                await super().__call__(scope, receive, send)
        finally:
            self.answer.close()


@dataclass
class _Answer:
    """The answer to one request for a completion or a reply in a chat; to be closed."""

    service: _Service
    engine: EngineThread
    handle: Handle
    form: CompletionRequest
    started: float

    def __post_init__(self) -> None:
        requests, self.chat = self.handle.requests, isinstance(self.form, ChatRequest)
        self.lengths = [0] * sum(one.samples for one in requests)  # of the texts so far
        self.prompt_tokens, self.new_tokens = sum(len(one.tokens) for one in requests), 0
        kind, prefix = ("chat.completion", "chatcmpl") if self.chat else ("text_completion", "cmpl")
        kind += ".chunk" if self.chat and self.form.stream else ""
        name, created = f"{prefix}-{uuid.uuid4().hex}", int(time.time())
        self.head = {"id": name, "object": kind, "created": created, "model": self.service.name}
        self.status, self.first_token = 499, 0.0

    async def complete(self) -> str:
        """The JSON of the whole."""
        try:
            tokens: list[list[Token]] = [[] for _ in self.lengths]
            async for index, token in self._tokens():
                tokens[index].append(token)
            # A large one takes seconds, in which the tokens of others would wait.
            body = await asyncio.to_thread(self._body, tokens)
            self.status = 200
            return body
        finally:
            self.close()

    def _body(self, tokens: list[list[Token]]) -> str:
        choices = [self._choice(index, some) for index, some in enumerate(tokens)]
        return json.dumps({**self.head, "choices": choices, "usage": self._usage()}, ensure_ascii=False)

    async def events(self) -> AsyncGenerator[str, None]:
        """The JSON of each token that has a text, as server-sent events."""
        try:
            async for index, token in self._tokens():
                if token.text or token.finished or self.form.logprobs is not None:
                    yield _event({**self.head, "choices": [self._choice(index, [token])]})
            if (self.form.stream_options or {}).get("include_usage"):
                yield _event({**self.head, "choices": [], "usage": self._usage()})
            self.status = 200
        except (HTTPException, InputError) as error:  # the status is already sent, so the error is an event
            body, self.status = error_body(error)
            yield _event(body)
        yield "data: [DONE]\n\n"

    async def _tokens(self) -> AsyncGenerator[Piece, None]:
        """Yield each token with the index of its choice, in time; the others' come between two of them."""
        while self.handle.unread:
            left = self.started + self.service.limits.seconds - time.perf_counter()
            try:
                pieces = await asyncio.wait_for(self.handle.next(), left)
            except asyncio.TimeoutError:
                raise self.service.late() from None
            for index, token in pieces:
                await asyncio.sleep(0)
                yield index, token
                if not token.echoed:
                    self.first_token = self.first_token or time.perf_counter()
                    self.new_tokens += 1

    def close(self) -> None:
        """Stop the work, and count what was done."""
        self.engine.cancel(self.handle)
        if self.form.stream or self.status == 200:  # other errors are counted where they are answered
            self.service.count(self.status)
        counts, ended = self.service.counts, time.perf_counter()
        counts["prompt_tokens_total"] += self.prompt_tokens
        counts["generated_tokens_total"] += self.new_tokens
        counts["request_seconds_total"] += ended - self.started
        counts["first_token_seconds_total"] += (self.first_token or ended) - self.started

    def _choice(self, index: int, tokens: list[Token]) -> dict[str, Any]:
        """The entry of `choices` for the tokens after those of earlier entries."""
        text, before = "".join(token.text for token in tokens), self.lengths[index]
        self.lengths[index] += len(text)
        logprobs: dict[str, Any] | None = None
        if self.form.logprobs is not None:
            logprobs = log_probabilities(self.service.tokenizer, tokens, before)
        choice = {"index": index, "logprobs": logprobs, "finish_reason": tokens[-1].finished}
        if not self.chat:
            return {"text": text, **choice}
        role = {} if before else {"role": "assistant"}  # in the first entry alone: clients join the texts
        return {**choice, "delta" if self.form.stream else "message": {**role, "content": text}}

    def _usage(self) -> dict[str, int]:
        read, written = self.prompt_tokens, self.new_tokens
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"
