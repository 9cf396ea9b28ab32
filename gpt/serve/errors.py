"""All errors that a client can get, in OpenAI's form."""

import logging

from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from gpt.errors import InputError
from gpt.plain import JsonObject

_MOST = 512  # errors in a body; to list more would delay other clients
# The rest of a refused body is not read, so its connection is closed.
_HEADERS = {408: {"connection": "close"}, 413: {"connection": "close"}, 503: {"retry-after": "1"}}


def server_failed(error: Exception) -> HTTPException:
    """Log an error of the server itself. Return what the client sees: status 500, without details."""
    logging.getLogger(__name__).error("a request failed: %r", error, exc_info=error)
    return HTTPException(500, "the server failed")


def error_body(error: Exception) -> tuple[JsonObject, int]:
    """Return the JSON body and the status for any exception. Internals and tracebacks are not shown."""
    if isinstance(error, ValidationError):
        if error.error_count() > _MOST:
            return error_body(InputError(f"the body has {error.error_count()} errors"))
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        what = "there is no such field" if first["type"] == "extra_forbidden" else first["msg"]
        error = InputError(f"{'.'.join(map(str, first['loc'])) or 'the body':.200}: {what}")
    if isinstance(error, InputError):
        error = HTTPException(400, " ".join(str(error).split()))
    shown = error if isinstance(error, HTTPException) else server_failed(error)
    kind = "server_error" if shown.status_code >= 500 else "invalid_request_error"
    content = {"message": shown.detail, "type": kind, "param": None, "code": shown.status_code}
    return {"error": content}, shown.status_code


def error_reply(error: Exception) -> JSONResponse:
    """Return the HTTP response for any exception."""
    body, status = error_body(error)
    return JSONResponse(body, status, _HEADERS.get(status))
