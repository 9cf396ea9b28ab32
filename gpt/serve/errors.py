"""Every error that a client can get, in the OpenAI form."""

from typing import Any

from starlette.exceptions import HTTPException

from gpt.errors import InputError


class ApiError(Exception):
    """An error with its HTTP status, its code and a message for the client."""

    status, code, message = 500, "internal_error", "the server failed"

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": None, "code": self.code}}


class InvalidKey(ApiError):
    """The `Authorization` header does not carry the key."""

    status, code, message = 401, "invalid_api_key", "the API key is missing or wrong"


class BodyTooLarge(ApiError):
    """The body is over the limit."""

    status, code = 413, "request_too_large"

    def __init__(self, most: int) -> None:
        self.message = f"the body is over {most} bytes"


class ClientDisconnected(ApiError):
    """The client closed the connection; it does not get this answer."""

    status, code, message = 499, "client_disconnected", "the client disconnected"


class BodyTimedOut(ApiError):
    """The client sends its body too slowly."""

    status, code, message = 408, "request_timeout", "the body did not arrive in time"


class Busy(ApiError):
    """The queue is full."""

    status, code, message = 503, "busy", "too many requests are waiting, try again later"


class TimedOut(ApiError):
    """The time limit of the request is over."""

    status, code = 504, "timeout"

    def __init__(self, seconds: int) -> None:
        self.message = f"the request took more than {seconds} s"


def api_error(error: Exception) -> ApiError:
    """The error for the client; internals and tracebacks are not shown."""
    answer = error if isinstance(error, ApiError) else ApiError()
    if isinstance(error, InputError):
        answer.status, answer.code, answer.message = 400, "invalid_value", " ".join(str(error).split())
    if isinstance(error, HTTPException):
        answer.status, answer.code, answer.message = error.status_code, "http_error", error.detail
    return answer
