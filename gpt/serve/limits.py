"""What one client may ask for, so that others are served too."""

from dataclasses import dataclass, fields

from gpt.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The largest values that are accepted.

    Raises:
        InputError: a limit below one.
    """

    body_bytes: int = 1 << 20
    """Bytes of a request."""
    prompt_tokens: int = 8192
    """Tokens of a prompt; the model sees those at the end that fit its context."""
    new_tokens: int = 4096
    """Tokens of a completion."""
    samples: int = 128
    """Completions of a request: prompts times `n`."""
    stops: int = 4
    """Stop strings of a request."""
    stop_characters: int = 256
    """Characters of a stop string."""
    running: int = 16
    """Completions that are decoded together."""
    waiting: int = 64
    """Requests that wait; more are refused."""
    seconds: int = 300
    """Time for a request, including waiting."""
    read_seconds: int = 30
    """Time for the body of a request to arrive."""
    write_seconds: int = 30
    """Time for the client to take a part of the answer."""
    connections: int = 256
    """Connections that are open together."""
    attention_tokens: int = 256
    """Tokens whose attention is computed."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 1:
                raise InputError(f"{field.name} must be at least 1, got {getattr(self, field.name)}")

    def check(self, what: str, given: int, most: int) -> None:
        """Raise InputError if `given` is over `most`."""
        if given > most:
            raise InputError(f"{what} must be at most {most}, got {given}")
