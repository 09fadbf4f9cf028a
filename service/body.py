"""Reads a request's body: bounded in bytes, then JSON, then the dialect's schema."""

from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, TypeAdapter, ValidationError

from service.errors import RequestTooLargeError, request_error

T = TypeVar("T", bound=BaseModel)

_REF = "#/components/schemas/{model}"


async def read_body(
    request: Request, schema: type[T], max_bytes: int, *, may_be_empty: bool = False
) -> T:
    """``may_be_empty``: no body at all stands for an object without fields.

    Raises: RequestTooLargeError, RequestError naming the first wrong field.
    """
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
        return schema.model_validate_json(b"".join(chunks) or (b"{}" if may_be_empty else b""))
    except ValidationError as error:
        raise request_error(error) from error


def openapi_body(schema: type[BaseModel], *, required: bool = True) -> dict[str, Any]:
    """For a route's ``openapi_extra``, which FastAPI cannot know when we read the body."""
    reference = {"$ref": _REF.format(model=schema.__name__)}
    content = {"application/json": {"schema": reference}}
    return {"requestBody": {"required": required, "content": content}}


def openapi_components(schema: type) -> dict[str, Any]:
    """The schemas that a route refers to by the name of ``schema``."""
    own = TypeAdapter(schema).json_schema(ref_template=_REF)
    return {**own.pop("$defs", {}), schema.__name__: own}
