# ruff: noqa: E402 - what follows needs the extra, and the tests are skipped without it
"""A server with a tiny model, in this process or listening on the loopback."""

import asyncio
import copy
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
httpx = pytest.importorskip("httpx", reason="httpx is not installed")

from benchmarks.common import listening  # noqa: F401 - for the tests
from fastapi.testclient import TestClient

from gpt import GPT, GPTConfig, Tokenizer
from gpt.generation import generate
from gpt.serve.app import create_app
from tests.generation.conftest import sharp

MODEL = sharp(GPTConfig(vocab_size=257, context_length=64, emb_dim=32, num_heads=4, num_layers=2))
TOKENIZER = Tokenizer("gpt2", vocab_size=257)


class Hooked(GPT):
    """A model that calls `before(tokens)` each time it computes: to be slow, or to fail."""

    def features(self, tokens: Any, **inputs: Any) -> Any:
        self.before(tokens)
        return super().features(tokens, **inputs)


def hooked(before: Callable[[Any], None]) -> GPT:
    model = copy.deepcopy(MODEL)
    model.__class__, model.before = Hooked, before
    return model


def slow(seconds: float = 0.05) -> GPT:
    """A model whose every step takes this long."""
    return hooked(lambda tokens: time.sleep(seconds))


def new_app(model: GPT = MODEL, **options: Any):
    return create_app(model, TOKENIZER, name="tiny", **options)


def connected(app: Any) -> TestClient:
    """A client of an application, which ends with the block."""
    return TestClient(app, raise_server_exceptions=False)


def get(app: Any, path: str, **options: Any) -> Any:
    with connected(app) as client:
        return client.get(path, **options)


def post(app: Any, path: str = "/v1/completions", **form: Any) -> Any:
    with connected(app) as client:
        return client.post(path, json=form)


def choice_of(response: Any) -> Any:
    """The only choice of a completion."""
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return choice


def talk(app: Any, use: Callable[[Any], Awaitable[Any]]) -> Any:
    """Run `use(client)`, whose requests may run at the same time."""

    async def main() -> Any:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client,
        ):
            return await use(client)

    return asyncio.run(main())


def alone(prompt: str | list[int], count: int, **options: Any) -> str:
    """What the model writes after a text or its ids."""
    ids = TOKENIZER.encode(prompt) if isinstance(prompt, str) else prompt
    (row,) = generate(MODEL, [ids], max_new_tokens=count, **options)
    return TOKENIZER.decode(row[len(ids) :]).partition("<|endoftext|>")[0]


def events(response: Any) -> list[Any]:
    """Those of a stream that has ended."""
    *lines, end = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert end == "[DONE]"
    return [json.loads(line) for line in lines]


def streamed(response: Any, index: int = 0) -> list[Any]:
    """The pieces of a choice in a stream that has ended, of which only the last one says why it ends."""
    choices = [event["choices"][0] for event in events(response) if event["choices"]]
    pieces = [choice for choice in choices if choice["index"] == index]
    assert all((piece["finish_reason"] is None) == (piece is not pieces[-1]) for piece in pieces)
    return pieces


def idle(app: Any) -> bool:
    """Whether soon no request is open and nothing is decoded."""
    service, deadline = app.state.service, time.monotonic() + 5
    while service.cost or service.history.own.open or service.history.own._engine.busy:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
