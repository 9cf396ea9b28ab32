"""uvicorn, which ends what arrives too slowly, and tells the clients that its end cuts off."""

import asyncio
from functools import partial
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from gpt.serve.limits import Limits

_CONNECTIONS = 256  # that are open together
_ARRIVING = 128  # of them, those that are idle or whose request is still arriving


class Connection(H11Protocol):
    """A connection that is closed where a request takes longer than `seconds` to arrive, head and body.

    Where more than `_ARRIVING` connections are without a whole request, the one that has been so the longest
    is closed: clients that send nothing, or half a request, leave room for the others.
    """

    def __init__(self, *, seconds: float, **options: Any) -> None:
        super().__init__(**options)
        self._seconds = seconds
        self._arriving: asyncio.TimerHandle | None = None  # ends the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request."""
        super().connection_made(transport)
        self._update()

    def data_received(self, data: bytes) -> None:
        """Read a part of a request, and perhaps begin to answer it."""
        super().data_received(data)
        self._update()

    def on_response_complete(self) -> None:
        """Wait for the next request, which may have arrived already."""
        super().on_response_complete()
        self._update()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
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
        ends = {
            one._arriving.when(): one
            for one in self.connections
            if isinstance(one, Connection) and one._arriving and not one.transport.is_closing()
        }
        if len(ends) > _ARRIVING:
            ends[min(ends)].transport.close()


class Server(uvicorn.Server):
    """A server of `create_app`'s application; `options` are those of `uvicorn.Config`."""

    def __init__(self, app: FastAPI, limits: Limits, **options: Any) -> None:
        # The application refuses a slow body by itself, and says so.
        protocol = partial(Connection, seconds=limits.arrival_seconds + limits.last_seconds)
        options = {"http": protocol, "log_level": "warning", "limit_concurrency": _CONNECTIONS, **options}
        graceful = limits.drain_seconds + limits.last_seconds
        super().__init__(uvicorn.Config(app, timeout_graceful_shutdown=graceful, **options))
        self.drain_seconds = limits.drain_seconds
        self.end = app.state.end

    async def shutdown(self, sockets: Any = None) -> None:
        """Take no more connections, let open requests end for a while, and tell the clients of the others."""
        asyncio.get_running_loop().call_later(self.drain_seconds, self.end)
        await super().shutdown(sockets)
