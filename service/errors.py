"""What a caller sees when something is wrong: a status code and one JSON shape.

``{"error": {"type": "RequestError", "message": "...", "field": "prompts[3]"}}``, for our own
errors, for bodies that do not parse and for unknown paths alike.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from placement.errors import (
    FlexFloorError,
    OverloadedError,
    RequestError,
    UnavailableError,
    UnknownIdError,
)

logger = logging.getLogger(__name__)

_STATUS: dict[type[FlexFloorError], int] = {
    RequestError: 400,
    UnknownIdError: 404,
    OverloadedError: 429,
    UnavailableError: 503,
}
RETRY_AFTER_S = 2
_MAX_SHOWN_CHARS = 80


class RequestTooLargeError(RequestError):
    """The body has more bytes than the service takes (HTTP 413)."""


class NotServedError(RequestError):
    """A dialect knows this, and this service cannot do it (HTTP 501); the message says what to
    use instead."""


def status_code(error: FlexFloorError) -> int:
    """The status of the nearest class in the tree; an error without one is ours: 500."""
    if isinstance(error, RequestTooLargeError):
        return 413
    if isinstance(error, NotServedError):
        return 501
    return next((_STATUS[kind] for kind in type(error).__mro__ if kind in _STATUS), 500)


@dataclass(frozen=True, slots=True)
class ErrorContent:
    """``field``: what is at fault, as the caller wrote it."""

    type: str
    message: str
    field: str | None


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    error: ErrorContent


def error_answers(*codes: int, shape: type = ErrorAnswer) -> dict[int | str, dict[str, Any]]:
    """For a route's ``responses``, by reference: a model of their own for each would be most of
    what making the application costs. ``shape``: a dialect's own, one of ``app.ERROR_SHAPES``."""
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{shape.__name__}"}}}
    return {code: {"description": HTTPStatus(code).phrase, "content": content} for code in codes}


def error_body(kind: str, message: str, field: str | None = None) -> dict[str, Any]:
    return {"error": {"type": kind, "message": message, "field": field}}


def describe(error: FlexFloorError) -> dict[str, Any]:
    return error_body(type(error).__name__, error.message, error.field)


def field_path(location: Sequence[str | int]) -> str | None:
    """``("prompts", 0, "(ids)", 2)`` as the caller wrote it: ``prompts[0][2]``."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not part.startswith("("):  # the name of a kind, not of a field
            path += f".{part}" if path else part
    return path or None


def request_error(error: ValidationError | RequestValidationError) -> RequestError:
    """The first thing that is wrong, with its value, and how many more there are."""
    found = error.errors()
    first = found[0]
    message = str(first["msg"])
    if first["type"] not in ("missing", "json_invalid"):
        value = repr(first.get("input"))
        if len(value) > _MAX_SHOWN_CHARS:
            value = value[:_MAX_SHOWN_CHARS] + "..."
        message = f"{message}; got {value}"
    if len(found) > 1:
        message += f" (and {len(found) - 1} more)"
    return RequestError(message, field=field_path(first["loc"]))


def query_error(error: RequestValidationError) -> RequestError:
    """What is wrong with a parameter in the URL."""
    wrong = request_error(error)
    wrong.field = (wrong.field or "").removeprefix("query.").removeprefix("path.") or None
    return wrong


def render(error: FlexFloorError) -> JSONResponse:
    code = status_code(error)
    headers = {"Retry-After": str(RETRY_AFTER_S)} if code in (429, 503) else None
    return JSONResponse(describe(error), status_code=code, headers=headers)


def install_error_handlers(app: FastAPI) -> None:
    async def ours(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, FlexFloorError)
        code = status_code(error)
        if code >= 500:
            logger.warning("answered %d: %s", code, error)
        return render(error)

    async def invalid(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return render(query_error(error))

    async def http(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        return JSONResponse(
            error_body("HTTPError", str(error.detail)),
            status_code=error.status_code,
            headers=error.headers,
        )

    async def unexpected(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse(error_body(type(error).__name__, str(error)), status_code=500)

    app.add_exception_handler(FlexFloorError, ours)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, unexpected)
