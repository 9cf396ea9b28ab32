"""Checks around every request: the API key, the size of the body, and the time in which it arrives."""

import asyncio
import hmac
import time

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpt.serve.errors import ApiError, BodyTimedOut, BodyTooLarge, InvalidKey
from gpt.serve.limits import Limits

PUBLIC = ("/", "/health", "/metrics")
"""The paths that need no key."""


class Guard:
    """ASGI middleware.

    Args:
        app: the application behind it.
        limits: of bytes and seconds.
        api_key: what `Authorization: Bearer` must contain for all paths but PUBLIC; None requires nothing.
    """

    def __init__(self, app: ASGIApp, limits: Limits, api_key: str | None) -> None:
        self.app, self.limits = app, limits
        self.expected = None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers, most = dict(scope["headers"]), self.limits.body_bytes
        deadline = time.monotonic() + self.limits.read_seconds
        read, complete, started = 0, False, False

        async def checked_receive() -> Message:
            nonlocal read, complete
            if complete:  # what comes now is the end of the connection
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), deadline - time.monotonic())
            except asyncio.TimeoutError:  # not the built-in one before Python 3.11
                raise BodyTimedOut from None
            read += len(message.get("body", b""))
            if read > most:  # a chunked body declares no length
                raise BodyTooLarge(most)
            complete = not message.get("more_body", False)
            return message

        async def checked_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            given = headers.get(b"authorization", b"")
            # Compared in constant time, so that timing does not reveal how much of a guess is right.
            if (
                scope["path"] not in PUBLIC
                and self.expected
                and not hmac.compare_digest(given, self.expected)
            ):
                raise InvalidKey
            declared = headers.get(b"content-length", b"0")
            if declared.isdigit() and int(declared) > most:
                raise BodyTooLarge(most)
            await self.app(scope, checked_receive, checked_send)
        except ApiError as error:
            if not started:
                await JSONResponse(error.body(), error.status)(scope, receive, send)
