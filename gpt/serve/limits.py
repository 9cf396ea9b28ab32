"""What one client may ask for, so that others are served too, and what is checked before every request."""

import asyncio
import hmac
import time
from dataclasses import asdict, dataclass

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpt.errors import InputError
from gpt.serve.errors import error_reply

_PUBLIC = ("/", "/health", "/metrics")  # paths that need no key


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The largest values that are accepted; InputError for a limit below one."""

    body_bytes: int = 1 << 20  # of a request
    prompt_tokens: int = 8192  # the model sees those at the end that fit its context
    new_tokens: int = 4096  # of a completion
    samples: int = 128  # completions of a request: prompts times `n`
    stops: int = 4  # stop strings of a request
    stop_characters: int = 256  # of a stop string
    running: int = 16  # completions that are decoded together
    waiting: int = 64  # requests that wait; more are refused
    seconds: int = 300  # for a request, including waiting
    read_seconds: int = 30  # for the body of a request to arrive
    write_seconds: int = 30  # for the client to take a part of the answer
    connections: int = 256  # that are open together
    attention_tokens: int = 256  # whose attention is computed
    snapshots: int = 4  # of a run that are in memory

    def __post_init__(self) -> None:
        for name, limit in asdict(self).items():
            if limit < 1:
                raise InputError(f"{name} must be at least 1, got {limit}")


class Guard:
    """ASGI middleware: the API key, if there is one; the type of a body, its size and its time to arrive."""

    def __init__(self, app: ASGIApp, limits: Limits, api_key: str | None) -> None:
        self.app, self.limits = app, limits
        self.expected = None if api_key is None else f"Bearer {api_key}".encode("utf-8", "surrogateescape")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        app: ASGIApp = self.app
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            given, kind = headers.get(b"authorization", b""), headers.get(b"content-type", b"")
            private = self.expected and scope["path"] not in _PUBLIC
            # Compared in constant time, so that timing does not reveal how much of a guess is right.
            if private and not hmac.compare_digest(given, self.expected):
                app = error_reply(HTTPException(401, "the API key is missing or wrong"))
            # Pages of other sites cannot send JSON without permission.
            elif scope["method"] == "POST" and kind.split(b";")[0].strip().lower() != b"application/json":
                app = error_reply(HTTPException(415, "expected content-type application/json"))
            receive = self._limited(receive)
        await app(scope, receive, send)

    def _limited(self, receive: Receive) -> Receive:
        """Receive a body, which may declare no length, within the limits; later events as they come."""
        size, end, complete = 0, time.monotonic() + self.limits.read_seconds, False

        async def limited() -> Message:
            nonlocal size, complete
            if complete:
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), end - time.monotonic())
            except asyncio.TimeoutError:  # not the built-in one before Python 3.11
                raise HTTPException(408, "the body did not arrive in time") from None
            if message["type"] == "http.disconnect":
                raise HTTPException(499, "the client disconnected")
            size, complete = size + len(message.get("body", b"")), not message.get("more_body")
            if size > self.limits.body_bytes:
                raise HTTPException(413, f"the body is over {self.limits.body_bytes} bytes")
            return message

        return limited
