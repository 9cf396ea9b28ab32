"""The server's command up to its start, the compiled program, and the browser of the tests of the page."""

import pytest

from gpt.serve.start import serve
from tests.browser import start
from tests.generation.conftest import built, cache_with_program

__all__ = ["built", "cache_with_program", "start"]


@pytest.fixture
def started(monkeypatch):
    """Calls `serve`, whose server does not run, and gives its application, its settings and its address."""
    servers = []

    def run(server, sockets):
        (listener,) = sockets
        with listener:
            servers.append((server.config.app, server.config, listener.getsockname()))

    def call(checkpoint, **options):
        serve(checkpoint, port=0, **options)
        return servers.pop()

    monkeypatch.setattr("uvicorn.Server.run", run)
    monkeypatch.delenv("GPT_API_KEY", raising=False)
    return call
