"""What a request must pass before anything reads it: its size and the API key."""

import hmac
import json
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class TooLarge(Exception):
    """A body longer than allowed."""


class Guard:
    """ASGI middleware. The page, /health and /metrics need no key.

    Args:
        app: the application behind it.
        body_bytes: the most bytes of a request's body.
        api_key: what `Authorization: Bearer` must say under /v1 and /attention; None asks for nothing.
    """

    def __init__(self, app: ASGIApp, body_bytes: int, api_key: str | None) -> None:
        self.app, self.body_bytes = app, body_bytes
        self.expected = None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        guarded = scope["path"].startswith(("/v1", "/attention"))
        # Compared in constant time, so that the time of an answer does not tell how much of a guess is right.
        if (
            guarded
            and self.expected
            and not hmac.compare_digest(headers.get(b"authorization", b""), self.expected)
        ):
            await refuse(send, 401, "the API key is missing or wrong", "invalid_api_key")
            return
        declared = headers.get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self.body_bytes:
            await refuse(send, 413, f"the body is over {self.body_bytes} bytes", "request_too_large")
            return
        read = 0

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self.body_bytes:  # a body sent in pieces declares no length
                raise TooLarge
            return message

        try:
            await self.app(scope, counted, send)
        except TooLarge:
            await refuse(send, 413, f"the body is over {self.body_bytes} bytes", "request_too_large")


def error_body(message: str, code: str, status: int) -> dict[str, Any]:
    """An error in the OpenAI form."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


async def refuse(send: Send, status: int, message: str, code: str) -> None:
    """Answer with an error."""
    body = json.dumps(error_body(message, code, status)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
