"""What a dialect consists of beside its routes: its shape of errors, the fields that it takes, and
its streams of server-sent events."""

import json
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Annotated, Any, ClassVar, Self

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field, model_validator

from placement.errors import FlexFloorError, RequestError
from service.errors import RETRY_AFTER_S, error_answers, query_error, status_code

EVENT_STREAM = "text/event-stream"
DONE = b"data: [DONE]\n\n"

Shape = Callable[[FlexFloorError], dict[str, Any]]
"""An error as a dialect's clients expect it."""

TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]

ANYTHING = object()
"""A neutral field whose value never changes a response."""


NEUTRAL = "x-neutral"
"""Where a schema lists the fields that may be sent and change nothing."""


def _tell_neutral(schema: dict[str, Any], model: type[BaseModel]) -> None:
    assert issubclass(model, DialectBody)
    if model.neutral:
        schema[NEUTRAL] = {
            name: None if allowed is ANYTHING else list(allowed)
            for name, allowed in model.neutral.items()
        }


class DialectBody(BaseModel):
    """A request of a dialect that has more fields than we serve.

    ``neutral`` names fields that real clients send, with the values that change nothing; another
    value, or another field, is an error: a setting that is ignored would be noticed late.
    """

    model_config = ConfigDict(
        extra="allow",
        strict=True,
        frozen=True,
        use_attribute_docstrings=True,
        json_schema_extra=_tell_neutral,
    )
    neutral: ClassVar[Mapping[str, Any]] = {}
    inside: ClassVar[str] = ""
    """Path of the object in the request, with a dot at its end."""

    @model_validator(mode="after")
    def _only_neutral_fields(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            field = f"{self.inside}{name}"
            if name not in self.neutral:
                raise RequestError("is no field of this request", field=field)
            allowed = self.neutral[name]
            if allowed is not ANYTHING and value not in allowed:
                values = " or ".join(json.dumps(value) for value in allowed)
                raise RequestError(f"is {value!r}; only {values} is served", field=field)
        return self


def dialect_route(shape: Shape) -> type[APIRoute]:
    """The class of a router's routes whose errors have this shape."""

    class DialectRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def handle_or_explain(request: Request) -> Response:
                try:
                    return await handle(request)
                except FlexFloorError as error:
                    return render_error(error, shape)
                except RequestValidationError as error:
                    return render_error(query_error(error), shape)

            return handle_or_explain

    return DialectRoute


def generation_answers(shape: type) -> dict[int | str, dict[str, Any]]:
    """The ``responses`` of a route that generates, whole or as events; ``shape``: of its errors."""
    errors = error_answers(400, 404, 413, 429, 503, shape=shape)
    return {200: {"content": {EVENT_STREAM: {}}}, **errors}


def render_error(error: FlexFloorError, shape: Shape) -> JSONResponse:
    code = status_code(error)
    headers = {"Retry-After": str(RETRY_AFTER_S)} if code in (429, 503) else None
    return JSONResponse(shape(error), status_code=code, headers=headers)


def event(content: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False).encode() + b"\n\n"


async def explained(events: AsyncIterator[bytes], shape: Shape) -> AsyncIterator[bytes]:
    """The events, an error as one of them, and the end of the stream."""
    try:
        async for body in events:
            yield body
    except FlexFloorError as error:
        yield event(shape(error))
    yield DONE
