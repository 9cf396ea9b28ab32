"""Checks that every request passes before a handler sees it: the API key and the size of the body."""

import hmac

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpt.serve.errors import ApiError, BodyTooLarge, InvalidKey


class Guard:
    """ASGI middleware. The page, /health and /metrics need no key.

    Args:
        app: the application behind it.
        body_bytes: the most bytes of a request's body.
        api_key: what `Authorization: Bearer` must contain under /v1 and /attention; None requires nothing.
    """

    def __init__(self, app: ASGIApp, body_bytes: int, api_key: str | None) -> None:
        self.app, self.body_bytes = app, body_bytes
        self.expected = None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers, read = dict(scope["headers"]), 0

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self.body_bytes:  # a chunked body declares no length
                raise BodyTooLarge(self.body_bytes)
            return message

        try:
            guarded = scope["path"].startswith(("/v1", "/attention"))
            given = headers.get(b"authorization", b"")
            # Compared in constant time, so that timing does not reveal how much of a guess is right.
            if guarded and self.expected and not hmac.compare_digest(given, self.expected):
                raise InvalidKey
            declared = headers.get(b"content-length", b"0")
            if declared.isdigit() and int(declared) > self.body_bytes:
                raise BodyTooLarge(self.body_bytes)
            await self.app(scope, counted, send)
        except ApiError as error:
            await JSONResponse(error.body(), error.status)(scope, receive, send)
