"""uvicorn, which tells the clients that its end cuts off."""

import asyncio
from typing import Any

import uvicorn
from fastapi import FastAPI

from gpt.serve.limits import Limits

_CONNECTIONS = 256  # that are open together


class Server(uvicorn.Server):
    """A server of `create_app`'s application; `options` are those of `uvicorn.Config`."""

    def __init__(self, app: FastAPI, limits: Limits, **options: Any) -> None:
        options = {"http": "h11", "log_level": "warning", "limit_concurrency": _CONNECTIONS, **options}
        graceful = limits.drain_seconds + limits.last_seconds
        super().__init__(uvicorn.Config(app, timeout_graceful_shutdown=graceful, **options))
        self.drain_seconds = limits.drain_seconds
        self.end = app.state.end

    async def shutdown(self, sockets: Any = None) -> None:
        """Take no more connections, let open requests end for a while, and tell the clients of the others."""
        asyncio.get_running_loop().call_later(self.drain_seconds, self.end)
        await super().shutdown(sockets)
