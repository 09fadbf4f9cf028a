"""``docs/http-api.md``: every route and every field, from the OpenAPI document.

After a change of routes or schemas::

    python -m service.http_api > docs/http-api.md
"""

import json
import sys
from collections.abc import Iterator
from typing import Any

from service.app import create_app
from service.dialect import NEUTRAL
from service.settings import ServiceSettings

_HEAD = """\
# HTTP API

Generated from the OpenAPI document (`/openapi.json`) by `python -m service.http_api`.

One service, five dialects. In all of them: what is wrong with a request is answered with 400, the
field, the value and the limit; 413 is a body that is too large, 429 (with `Retry-After`) a full
queue, 503 (with `Retry-After`) a service that cannot do it now, 501 what a dialect knows and this
service cannot do. A client that closes its connection ends its samples, unless its rollout says
that it may come back (`reconnect_s`). An id that the client gives makes a request idempotent:
repeated with the same content it joins the one that runs, with other content it is refused. Where
`service.token_file` is set, requests without `Authorization: Bearer TOKEN` get 401.

The OpenAI, SGLang and vLLM dialects take more fields than they list, as long as the value changes
nothing (`"presence_penalty": 0`); any other value is an error, and never ignored.

Logprobs of a response are those after temperature and truncation, and alternatives are tokens that
could have been drawn; logprobs of a prompt are those after temperature, so scoring a sequence says
what decoding it without truncation said (bit for bit in exact mode). Routed experts come as one
row per token of prompt and response but the last, from the forward that made the response; if a row
is missing there is no array, and never a padded one. All of it is computed once, however often a
sample moves, and costs nothing unless it is asked for.

Where other servers go by the headers `X-Session-ID` and `X-data-parallel-rank`, this one decides
itself who decodes what, and they change nothing. There is no session either: a worker keeps no
prefix of an earlier request (its KV memory is resized when experts come and go, and cached blocks
could not move with it), so the next turn of a conversation costs the same on every one of them.
"""
_NATIVE = "FlexFloor"


def render(document: dict[str, Any]) -> str:
    """The whole text."""
    by_tag: dict[str, list[str]] = {_NATIVE: []}
    bodies: list[str] = []
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            (tag,) = operation.get("tags", [_NATIVE])
            lines = by_tag.setdefault(tag, [])
            lines += [f"### `{method.upper()} {path}`", "", *_described(operation), ""]
            lines += list(_parameters(operation.get("parameters", [])))
            if body := _body_name(operation):
                lines += [f"Body: [{body}](#{body.lower()}).", ""]
                bodies.append(body)
    schemas = document["components"]["schemas"]
    text = [_HEAD]
    for tag, lines in by_tag.items():
        text += [f"## {tag}", "", *lines]
    text += ["## Bodies", ""]
    for name in _with_parts(bodies, schemas):
        text += [f"### {name}", "", *_schema(schemas[name])]
    return "\n".join(text).rstrip() + "\n"


def _described(operation: dict[str, Any]) -> list[str]:
    return str(operation.get("description", "")).replace("``", "`").strip().splitlines()


def _parameters(parameters: list[dict[str, Any]]) -> Iterator[str]:
    if parameters:
        yield "| parameter | in | default |"
        yield "|---|---|---|"
        for parameter in parameters:
            schema = parameter["schema"]
            default = _shown(schema["default"]) if "default" in schema else "required"
            yield f"| `{parameter['name']}` | {parameter['in']} | {default} |"
        yield ""


def _body_name(operation: dict[str, Any]) -> str:
    content = operation.get("requestBody", {}).get("content", {}).get("application/json")
    return content["schema"]["$ref"].rpartition("/")[2] if content else ""


def _with_parts(names: list[str], schemas: dict[str, Any]) -> list[str]:
    """The bodies, each followed by the schemas that it consists of."""
    found: list[str] = []

    def visit(name: str) -> None:
        if name not in found:
            found.append(name)
            for field in schemas[name].get("properties", {}).values():
                for part in _references(field):
                    visit(part)

    for name in names:
        visit(name)
    return found


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        if "$ref" in schema:
            yield schema["$ref"].rpartition("/")[2]
        for part in schema.values():
            yield from _references(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from _references(part)


def _schema(schema: dict[str, Any]) -> Iterator[str]:
    required = schema.get("required", [])
    yield "| field | type | default | meaning |"
    yield "|---|---|---|---|"
    for name, field in schema["properties"].items():
        default = "required" if name in required else _shown(field.get("default"))
        meaning = " ".join(field.get("description", "").split()).replace("``", "`")
        yield f"| `{name}` | {_type(field)} | {default} | {meaning} |"
    yield ""
    if neutral := schema.get(NEUTRAL):
        taken = (
            f"`{name}`" if values is None else f"`{name}` ({_values(values)})"
            for name, values in neutral.items()
        )
        yield f"Taken if it changes nothing: {', '.join(taken)}."
        yield ""


def _values(values: list[Any]) -> str:
    return " or ".join(f"`{json.dumps(value)}`" for value in values)


def _shown(default: object) -> str:
    if default is None or isinstance(default, dict):
        return ""
    return f"`{json.dumps(default)}`"


def _type(field: dict[str, Any]) -> str:
    for choice in ("anyOf", "oneOf"):
        if choice in field:
            kinds = [_type(part) for part in field[choice]]
            return " or ".join(dict.fromkeys(kind for kind in kinds if kind != "null"))
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in field:
        values = field["enum"]
        return " or ".join(f"`{v if isinstance(v, str) else json.dumps(v)}`" for v in values)
    if field.get("type") == "array":
        return f"list of {_type(field['items'])}"
    return str(field.get("type", "any"))


def http_api_text() -> str:
    """What ``docs/http-api.md`` has to say."""
    nobody: Any = None  # a document needs no coordinator
    return render(create_app(nobody, ServiceSettings(), None).openapi())


if __name__ == "__main__":
    sys.stdout.write(http_api_text())
