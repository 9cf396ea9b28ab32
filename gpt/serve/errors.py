"""All errors that a client can get, in OpenAI's form."""

import logging

from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from gpt.errors import InputError
from gpt.plain import JsonObject

SERVER_FAILED = "the server failed"
"""The message that a client gets if the server itself is at fault."""
_MOST = 512  # errors in a body; to list more would delay other clients
# The rest of a refused body is not read, so its connection is closed.
_HEADERS = {
    401: {"www-authenticate": "Bearer"},
    408: {"connection": "close"},
    413: {"connection": "close"},
    503: {"retry-after": "1"},
}


class CodedError(HTTPException):
    """An error for which OpenAI's API has a `code` besides the status."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(status, message)
        self.code = code


def server_failed(error: Exception) -> HTTPException:
    """Log an error of the server itself. Return what the client sees: status 500, without details."""
    logging.getLogger(__name__).error("a request failed: %r", error, exc_info=error)
    return HTTPException(500, SERVER_FAILED)


def _for_client(error: Exception) -> HTTPException:
    """Return what the client sees of any exception: no internals, no traceback."""
    if isinstance(error, HTTPException):
        return error
    if isinstance(error, InputError | ValidationError):
        message = str(error) if isinstance(error, InputError) else _first_complaint(error)
        return HTTPException(400, " ".join(message.split()))
    return server_failed(error)


def _first_complaint(error: ValidationError) -> str:
    """Return the first of a body's errors."""
    if error.error_count() > _MOST:
        return f"the body has {error.error_count()} errors"
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    what = "there is no such field" if first["type"] == "extra_forbidden" else first["msg"]
    return f"{'.'.join(map(str, first['loc'])) or 'the body':.200}: {what}"


def error_body(error: HTTPException) -> JsonObject:
    """Return the JSON body for an error."""
    kind = "server_error" if error.status_code >= 500 else "invalid_request_error"
    code = error.code if isinstance(error, CodedError) else None
    return {"error": {"message": error.detail, "type": kind, "param": None, "code": code}}


def error_reply(error: Exception) -> JSONResponse:
    """Return the HTTP response for any exception."""
    told = _for_client(error)
    headers = {**(told.headers or {}), **_HEADERS.get(told.status_code, {})}
    return JSONResponse(error_body(told), told.status_code, headers)
