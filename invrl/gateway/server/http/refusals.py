"""Refusals of requests: every error becomes an answer in the shape that the client's
library expects."""

import logging
from collections.abc import Callable

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from invrl.errors import DiskFullError, SessionError
from invrl.gateway.dialects.json_text import invalid_json, lone_surrogate
from invrl.gateway.server.http.path_hints import hint

_log = logging.getLogger(__name__)
_SPACE_RETRY_S = 5.0
_CODES = {404: "not_found", 405: "method_not_allowed"}

FormatError = Callable[[Request, SessionError], bytes]
"""Returns the body of an error, as the client of this request expects it."""


def retry_after(error: SessionError) -> dict[str, str]:
    """Return the header of a temporary refusal; no header for any other."""
    if error.retry_after_s is None:
        return {}
    return {"retry-after": f"{error.retry_after_s:g}"}


def disk_full(error: DiskFullError) -> SessionError:
    """The refusal of a request that cannot be recorded now; of an agent's call, which
    has waited for space. The store's writer has logged the error."""
    reason = f"nothing can be recorded: {error}"
    return SessionError(
        reason, status=503, code="disk_full", retry_after_s=_SPACE_RETRY_S
    )


NoteRefusal = Callable[[Request, SessionError], None]
"""Keeps a refusal for observers of the request's session."""


def add_error_handlers(
    app: FastAPI, format_error: FormatError, note_refusal: NoteRefusal
) -> None:
    """Make `app` answer every exception of its routes as a refusal."""

    async def refuse(request: Request, error: Exception) -> Response:
        refusal = _as_session_error(request, error)
        # JSON has no lone surrogates
        refusal.message = refusal.message.encode(errors="replace").decode()
        note_refusal(request, refusal)
        headers = retry_after(refusal)
        if isinstance(error, HTTPException) and error.headers:
            headers = {**error.headers, **headers}
        body = format_error(request, refusal)
        return Response(
            body,
            status_code=refusal.status,
            headers=headers,
            media_type="application/json",
        )

    for kind in (SessionError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, refuse)


def _as_session_error(request: Request, error: Exception) -> SessionError:
    if isinstance(error, SessionError):
        return error
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            place = first["loc"][-1]
            return invalid_json(
                f"the body is not valid JSON: {first['ctx']['error']} (character {place})"
            )
        field = ".".join(str(part) for part in first["loc"][1:])
        if first["type"] == "string_unicode":
            return lone_surrogate(field)
        message = str(first["msg"])
        if field:
            message = f"{field}: {message}"
        return SessionError(
            message, status=400, code="invalid_request", param=field or None
        )
    if isinstance(error, HTTPException):
        # no session key in an error
        path = request.url.path.partition("/s/")[0] or "/s/…"
        message = f"{request.method} {path}: {error.detail}"
        meant = hint(request.url.path)
        if error.status_code == 404 and meant:
            message = f"{message}; {meant}"
        code = _CODES.get(error.status_code, "invalid_request")
        return SessionError(message, status=error.status_code, code=code)
    if isinstance(error, DiskFullError):
        return disk_full(error)
    _log.error("a request failed inside of the gateway", exc_info=error)
    return SessionError("internal error", status=500, code="internal_error")
