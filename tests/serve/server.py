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
from torch import Tensor

from gpt import GPT, GPTConfig, Tokenizer
from gpt.generation import generate
from gpt.serve.app import create_app
from tests.generation.conftest import sharp

MODEL = sharp(GPTConfig(vocab_size=257, context_length=64, emb_dim=32, num_heads=4, num_layers=2))
TOKENIZER = Tokenizer("gpt2", vocab_size=257)


class Hooked(GPT):
    """A model that gives `hook(tokens, features)`, with what it computed: to be slow or wrong, or to fail."""

    def features(self, tokens: Tensor, **inputs: Any) -> Tensor:
        return self.hook(tokens, super().features(tokens, **inputs))


def hooked(hook: Callable[[Tensor, Tensor], Tensor]) -> GPT:
    model = copy.deepcopy(MODEL)
    model.__class__, model.hook = Hooked, hook
    return model


def slow(seconds: float = 0.05) -> GPT:
    """A model whose every step takes this long."""

    def wait(tokens: Tensor, features: Tensor) -> Tensor:
        time.sleep(seconds)
        return features

    return hooked(wait)


def new_app(model: GPT = MODEL, **options: Any):
    return create_app(model, TOKENIZER, name="tiny", **options)


def connected(app, address: str = "http://testserver") -> TestClient:
    """A client of an application, which ends with the block."""
    return TestClient(app, address, raise_server_exceptions=False)


def get(app, path: str):
    with connected(app) as client:
        return client.get(path)


def post(app, path: str = "/v1/completions", **form: Any):
    with connected(app) as client:
        return client.post(path, json=form)


def choice_of(response) -> dict[str, Any]:
    """The only choice of a completion."""
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return choice


def talk(app, use: Callable[[Any], Awaitable[Any]]):
    """Run `use(client)`, whose requests may run at the same time."""

    async def main():
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


def events(response) -> list[dict[str, Any]]:
    """Those of a stream that has ended."""
    *lines, end = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert end == "[DONE]"
    return [json.loads(line) for line in lines]


def streamed(response, index: int = 0) -> list[dict[str, Any]]:
    """The pieces of a choice in a stream that has ended, of which only the last one says why it ends."""
    choices = [event["choices"][0] for event in events(response) if event["choices"]]
    pieces = [choice for choice in choices if choice["index"] == index]
    assert all((piece["finish_reason"] is None) == (piece is not pieces[-1]) for piece in pieces)
    return pieces


def idle(app) -> bool:
    """Whether soon no request is open and nothing is decoded."""
    service, deadline = app.state.service, time.monotonic() + 5
    while service.open_cost or service.history.own.open or service.history.own._engine.busy:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
