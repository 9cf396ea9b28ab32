"""Checks before every request: the API key, and the declared size of the body."""

import hmac

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from gpt.serve.errors import body_too_large, error_reply

_PUBLIC = ("/", "/health", "/metrics")  # paths that need no key


class Guard:
    """ASGI middleware. With an `api_key`, `Authorization: Bearer` must contain it, but for public paths."""

    def __init__(self, app: ASGIApp, body_bytes: int, api_key: str | None) -> None:
        self.app, self.body_bytes = app, body_bytes
        self.expected = None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        app: ASGIApp = self.app
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            given, declared = headers.get(b"authorization", b""), headers.get(b"content-length", b"0")
            private = self.expected and scope["path"] not in _PUBLIC
            # Compared in constant time, so that timing does not reveal how much of a guess is right.
            if private and not hmac.compare_digest(given, self.expected):
                app = error_reply(HTTPException(401, "the API key is missing or wrong"))
            elif declared.isdigit() and int(declared) > self.body_bytes:
                app = error_reply(body_too_large(self.body_bytes))
        await app(scope, receive, send)
