"""What one client may ask for, so that others are served too."""

from dataclasses import asdict, dataclass

from gpt.errors import InputError


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

    def __post_init__(self) -> None:
        for name, limit in asdict(self).items():
            if limit < 1:
                raise InputError(f"{name} must be at least 1, got {limit}")
