"""A uvicorn server that closes slow connections, and sends an error to clients that its shutdown cuts off."""

import asyncio
import socket
from functools import partial
from operator import itemgetter
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from gpt.serve.limits import RequestLimits

_CONNECTIONS = 256  # the most open connections
_ARRIVING = 128  # the most of these that are idle, or whose request is still arriving


class Connection(H11Protocol):
    """A connection that is closed if a request, head and body, takes longer than `seconds` to arrive.

    If more than `_ARRIVING` connections have no whole request, the one that has waited the longest is closed.
    So clients that send nothing, or half a request, leave room for others. `options` are uvicorn's own.
    """

    def __init__(self, *, seconds: float, **options: Any) -> None:
        super().__init__(**options)
        self._seconds = seconds
        self._arriving: asyncio.TimerHandle | None = None  # closes the connection when it runs out

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer for the first request."""
        super().connection_made(transport)
        self._update()

    def data_received(self, data: bytes) -> None:
        """Read a part of a request. The answer begins when the request allows it."""
        super().data_received(data)
        self._update()

    def on_response_complete(self) -> None:
        """Start the timer for the next request, unless that has arrived already."""
        super().on_response_complete()
        self._update()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        super().connection_lost(exc)
        if self._arriving:
            self._arriving.cancel()
        self._arriving = None

    def _update(self) -> None:
        cycle = self.cycle
        whole = cycle is not None and not cycle.more_body and not cycle.response_complete
        if whole and self._arriving:
            self._arriving.cancel()
            self._arriving = None
        elif not whole and not self._arriving and not self.transport.is_closing():
            self._arriving = self.loop.call_later(self._seconds, self.transport.close)
            self._make_room()

    def _make_room(self) -> None:
        waiting = [
            (connection._arriving.when(), connection)
            for connection in self.connections
            if isinstance(connection, Connection)
            and connection._arriving
            and not connection.transport.is_closing()
        ]
        if len(waiting) > _ARRIVING:
            _, longest = min(waiting, key=itemgetter(0))
            longest.transport.close()


class Server(uvicorn.Server):
    """A server for the application of `create_app`. `options` are those of `uvicorn.Config`."""

    def __init__(self, app: FastAPI, limits: RequestLimits, **options: Any) -> None:
        # The application itself refuses a slow body with an error. So the connection waits a little longer.
        protocol = partial(Connection, seconds=limits.arrival_seconds + limits.last_seconds)
        options = {"http": protocol, "log_level": "warning", "limit_concurrency": _CONNECTIONS, **options}
        graceful = limits.drain_seconds + limits.last_seconds
        super().__init__(uvicorn.Config(app, timeout_graceful_shutdown=graceful, **options))
        self.drain_seconds = limits.drain_seconds
        self.end = app.state.end

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more connections and give open requests some time to end. Others then get an error."""
        asyncio.get_running_loop().call_later(self.drain_seconds, self.end)
        await super().shutdown(sockets)
