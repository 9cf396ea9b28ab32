"""uvicorn with what it lacks: time limits for headers to arrive and a reply to be read, a clear refusal."""

import asyncio
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from gpt.errors import InputError
from gpt.serve.limits import Limits

_LEAST_READ = 1 << 14  # bytes that a client must take of a long reply in each of its time limits


def new_server(app: ASGIApp, limits: Limits, **options: Any) -> uvicorn.Server:
    """A server of the application; `options` are those of `uvicorn.Config`."""
    protocol = type("Protocol", (_TimedProtocol,), {"limits": limits})
    options = {"log_level": "warning", "timeout_graceful_shutdown": 5, **options}
    return _Server(uvicorn.Config(app, http=protocol, limit_concurrency=limits.connections, **options))


class _Server(uvicorn.Server):
    """Its start raises InputError where it cannot listen; uvicorn's ends the process."""

    async def startup(self, sockets: Any = None) -> None:
        host, port = self.config.host, self.config.port
        try:
            tried = await asyncio.get_running_loop().create_server(asyncio.Protocol, host, port)
        except (OSError, OverflowError) as error:
            raise InputError(f"cannot listen on {host}, port {port}: {error}") from None
        tried.close()
        await super().startup(sockets)


class _TimedProtocol(H11Protocol):
    """A connection, which a slow client loses: it counts among the few that may be open."""

    limits: Limits
    _resumed = 0  # how often the client has taken enough for the server to write on

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._look(None)

    def resume_writing(self) -> None:
        self._resumed += 1
        super().resume_writing()

    def _look(self, before: Any) -> None:
        """End the connection if the server has waited for the client since the look `before`."""
        unsent = self.transport.get_write_buffer_size()
        waits = self.flow.write_paused or self.cycle is None or self.cycle.response_complete
        now = (self.cycle, self._resumed, -(-unsent // _LEAST_READ)) if waits else None
        if now and now == before:
            self.transport.abort()
        elif self in self.connections:  # not lost since
            seconds = self.limits.write_seconds if unsent else self.limits.read_seconds
            self.loop.call_later(seconds, self._look, now)
