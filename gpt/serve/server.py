"""uvicorn with time limits that it lacks: for a request's headers to arrive, and for a reply to be read."""

import asyncio
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from gpt.serve.limits import Limits

_LEAST_READ = 1 << 14  # bytes that a client must take of a long reply in each of its time limits


def new_server(app: ASGIApp, limits: Limits, **options: Any) -> uvicorn.Server:
    """A server of the application; `options` are those of `uvicorn.Config`."""
    protocol = type("Protocol", (_TimedProtocol,), {"limits": limits})
    options = {"log_level": "warning", "timeout_graceful_shutdown": 5, **options}
    return uvicorn.Server(uvicorn.Config(app, http=protocol, limit_concurrency=limits.connections, **options))


def _then_watch(event: str) -> Any:
    """The protocol's handler of an event, after which the server may wait for the client or no longer."""

    def handle(self: "_TimedProtocol", *arguments: Any) -> None:
        getattr(H11Protocol, event)(self, *arguments)
        self._watch()

    return handle


class _TimedProtocol(H11Protocol):
    """A connection, which a slow client loses: it counts among the few that may be open."""

    limits: Limits
    _deadline: asyncio.TimerHandle | None = None
    _unsent = 0

    connection_made = _then_watch("connection_made")
    data_received = _then_watch("data_received")
    on_response_complete = _then_watch("on_response_complete")
    pause_writing = _then_watch("pause_writing")
    resume_writing = _then_watch("resume_writing")

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Limit the time while the server waits for the client: to send headers, or to read."""
        if not (self.flow.write_paused or self.cycle is None or self.cycle.response_complete):
            self._cancel()
        elif self._deadline is None:
            self._start()

    def _start(self) -> None:
        self._unsent = self.transport.get_write_buffer_size()
        seconds = self.limits.write_seconds if self._unsent else self.limits.read_seconds
        self._deadline = self.loop.call_later(seconds, self._expire)

    def _cancel(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expire(self) -> None:
        if 0 < self.transport.get_write_buffer_size() <= self._unsent - _LEAST_READ:
            self._start()
        else:
            self.transport.abort()
