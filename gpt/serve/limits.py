"""Limits on what one client may ask for, so that others are served too. Checks before every request."""

import hmac
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from urllib.parse import urlsplit

import anyio
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from gpt import generation
from gpt.errors import InputError, check_least
from gpt.serve.errors import CodedError, error_reply

CALL_COST = 1 << 14  # the cost of a request for attention weights, in the units of `cost_of`
LOCAL = ("127.0.0.1", "localhost", "::1")  # the names of this machine for itself
# Paths that need no key: the page, which asks for the key, and the path that a supervisor polls.
_PUBLIC = ("/", "/health")


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """The largest values that are accepted. Raises InputError for a limit below one."""

    body_bytes: int = 1 << 20  # size of a request's body
    cost: int = 1 << 18  # cost of a request, see the function `cost_of`
    most_open_cost: int = 1 << 20  # cost of all open requests together; further ones are refused
    most_waiting_bytes: int = 8 << 20  # size of all bodies that wait to be tokenized; others are refused
    arrival_seconds: int = 30  # time for a request to arrive
    max_seconds: int = 300  # time for its answer
    drain_seconds: int = 30  # time for open requests to end when the server shuts down
    last_seconds: int = 5  # time after these two for the client to receive the error that ends its answer
    attention_tokens: int = 256  # tokens whose attention is computed
    snapshots: int = 4  # snapshots of a run in memory

    def __post_init__(self) -> None:
        check_least(1, **asdict(self))

    async def read_body(self, request: Request) -> bytes:
        """Read the body of a request, which need not declare its length.

        Raises HTTPException 413 if it is too large, 408 if it arrives too slowly.
        """
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


def cost_of(requests: Sequence[generation.Request]) -> int:
    """Return the memory and time that requests take, in units of about 200 bytes.

    A token of a prompt costs one, and so does a token of the answer. If log-probabilities are requested, each
    token of the answer costs one more, and one more for each alternative. Then each sample has the prompt's
    ids too, which cost one each. Each sample costs 64 besides.
    """
    total = 0
    for request in requests:
        prompt = len(request.tokens)
        tokens = request.max_new_tokens + (prompt if request.echo else 0)
        if request.alternatives is None:
            sample = 64 + tokens
        else:
            sample = 64 + tokens * (2 + request.alternatives) + prompt
        total += prompt + request.samples * sample
    return total


def check_key(api_key: str | None) -> None:
    """Raise InputError for an API key that some clients could not send in a header."""
    if api_key is not None and not re.fullmatch("[!-~]+", api_key):
        raise InputError("the API key must consist of ASCII letters, digits and signs, without spaces")


def guard(app: ASGIApp, api_key: str | None) -> ASGIApp:
    """Make ASGI middleware that checks the API key, if there is one, and the content type of a body."""
    expected = None if api_key is None else f"Bearer {api_key}".encode("ascii")

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        handler = app
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            given = headers.get(b"authorization", b"")
            kind = headers.get(b"content-type", b"")
            private = expected and scope["path"] not in _PUBLIC
            # The comparison takes constant time, so that timing does not reveal how much of a guess is right.
            if private and not hmac.compare_digest(given, expected):
                wrong = CodedError(401, "the API key is missing or wrong", "invalid_api_key")
                handler = error_reply(wrong)
            # Only JSON is accepted, as browsers do not let pages of other sites send it without permission.
            elif scope["method"] == "POST" and kind.split(b";")[0].strip().lower() != b"application/json":
                handler = error_reply(HTTPException(415, "expected content-type application/json"))
        await handler(scope, receive, send)

    return guarded


def local_only(app: ASGIApp) -> ASGIApp:
    """Make ASGI middleware that refuses every other name of the host than this machine's own.

    It prevents DNS rebinding: a page of another site that gives its own name this machine's address.
    """

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        handler = app
        if scope["type"] == "http" and _host(dict(scope["headers"])) not in LOCAL:
            handler = error_reply(HTTPException(400, f"unknown host, expected one of {', '.join(LOCAL)}"))
        await handler(scope, receive, send)

    return checked


def _host(headers: dict[bytes, bytes]) -> str | None:
    """Return the name in the header `host`, without a port; None if there is none."""
    try:
        return urlsplit(f"//{headers.get(b'host', b'').decode('latin-1')}").hostname
    except ValueError:  # half an IPv6 address
        return None
