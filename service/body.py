"""Reads a request's body: bounded in bytes, then JSON, then the dialect's schema."""

from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from service.errors import RequestTooLargeError, request_error

T = TypeVar("T", bound=BaseModel)

_REF = "#/components/schemas/{model}"


async def read_body(request: Request, schema: type[T], max_bytes: int) -> T:
    """Raises: RequestTooLargeError, RequestError naming the first wrong field."""
    chunks: list[bytes] = []
    num_bytes = 0
    async for chunk in request.stream():
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise RequestTooLargeError(
                f"the body has more than {max_bytes} bytes; send several rollouts or raise "
                "service.max_request_bytes"
            )
        chunks.append(chunk)
    try:
        return schema.model_validate_json(b"".join(chunks))
    except ValidationError as error:
        raise request_error(error) from error


def openapi_body(schema: type[BaseModel]) -> dict[str, Any]:
    """For a route's ``openapi_extra``, which FastAPI cannot know when we read the body."""
    reference = {"$ref": _REF.format(model=schema.__name__)}
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": reference}}}
    }


def openapi_components(schema: type[BaseModel]) -> dict[str, Any]:
    """The schemas that ``openapi_body`` refers to."""
    own = schema.model_json_schema(ref_template=_REF)
    return {**own.pop("$defs", {}), schema.__name__: own}
