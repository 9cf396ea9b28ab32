"""What one client may ask for, so that others are served too, and what is checked before every request."""

import hmac
from dataclasses import asdict, dataclass

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from gpt.errors import InputError
from gpt.serve.errors import body_too_large, error_reply

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
    """ASGI middleware that checks the API key, if there is one, and the declared size of the body."""

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
