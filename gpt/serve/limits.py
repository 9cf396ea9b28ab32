"""What one client may ask for, so that others are served too, and what is checked before every request."""

import hmac
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import anyio
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from gpt import generation
from gpt.errors import check_least
from gpt.serve.errors import error_reply

CALL_COST = 1 << 14  # of a look at the attention, in the units of `cost`
_PUBLIC = ("/", "/health")  # paths that need no key: the page, which asks for it, and what a supervisor polls


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The largest values that are accepted; InputError for a limit below one."""

    body_bytes: int = 1 << 20  # of a request
    cost: int = 1 << 18  # of a request, see `cost`
    open_cost: int = 1 << 20  # of all requests that are open; more are refused
    waiting_bytes: int = 8 << 20  # of bodies whose prompts wait to be tokenized; more are refused
    arrival_seconds: int = 30  # for a request to arrive
    seconds: int = 300  # for its answer
    drain_seconds: int = 30  # for open requests to end when the server shuts down
    last_seconds: int = 5  # after either, for the client to take the error that ends its answer
    attention_tokens: int = 256  # whose attention is computed
    snapshots: int = 4  # of a run that are in memory

    def __post_init__(self) -> None:
        check_least(1, **asdict(self))

    async def read_body(self, request: Request) -> bytes:
        """The body of a request, which may declare no length; HTTPException if it is too large or slow."""
        body = bytearray()
        try:
            with anyio.fail_after(self.arrival_seconds):
                async for part in request.stream():
                    body += part
                    if len(body) > self.body_bytes:
                        raise HTTPException(413, f"the body is over {self.body_bytes} bytes")
        except (TimeoutError, ClientDisconnect):
            raise HTTPException(408, "the body did not arrive") from None
        return bytes(body)


def cost(requests: Sequence[generation.Request]) -> int:
    """What requests take of memory and time, in units of about 200 bytes.

    A token of the answer is one; log-probabilities add one for its own and one for each alternative. A token
    of a prompt is one, and what every sample needs besides is 64.
    """
    total = 0
    for one in requests:
        tokens = one.max_new_tokens + (one.prompt_tokens if one.echo else 0)
        entries = 1 if one.alternatives is None else 2 + one.alternatives
        total += one.prompt_tokens + one.samples * (64 + tokens * entries)
    return total


def guard(app: ASGIApp, api_key: str | None) -> ASGIApp:
    """ASGI middleware that checks the API key, if there is one, and the type of a body."""
    expected = None if api_key is None else f"Bearer {api_key}".encode("utf-8", "surrogateescape")

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        handler = app
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            given = headers.get(b"authorization", b"")
            kind = headers.get(b"content-type", b"")
            private = expected and scope["path"] not in _PUBLIC
            # Compared in constant time, so that timing does not reveal how much of a guess is right.
            if private and not hmac.compare_digest(given, expected):
                handler = error_reply(HTTPException(401, "the API key is missing or wrong"))
            # Pages of other sites cannot send JSON without permission.
            elif scope["method"] == "POST" and kind.split(b";")[0].strip().lower() != b"application/json":
                handler = error_reply(HTTPException(415, "expected content-type application/json"))
        await handler(scope, receive, send)

    return guarded
