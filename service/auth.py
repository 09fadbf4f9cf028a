"""Who may ask: clients that send one of the service's tokens as ``Authorization: Bearer``.

Health and metrics are open: probes and scrapers have no token, and learn nothing of requests.
"""

import hmac
from collections.abc import Sequence
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from placement.errors import ConfigError

OPEN_PATHS = frozenset({"/health", "/health/", "/health_generate", "/liveness", "/metrics"})


def read_tokens(token_file: str) -> tuple[bytes, ...]:
    """A token per line: while tokens are exchanged, the old and the new one are taken.

    Raises: ConfigError.
    """
    try:
        lines = Path(token_file).read_text(encoding="ascii").split()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read {token_file}: {error}; name a file with a token per line",
            field="service.token_file",
        ) from error
    if not lines:
        raise ConfigError(
            f"{token_file} has no token; write one into it", field="service.token_file"
        )
    return tuple(line.encode() for line in lines)


class TokenAuth:
    """ASGI middleware that answers 401 to requests without a token."""

    def __init__(self, app: ASGIApp, tokens: Sequence[bytes]) -> None:
        self._app = app
        self._tokens = tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._may_ask(scope):
            await self._app(scope, receive, send)
            return
        message = "send one of the service's tokens as 'Authorization: Bearer TOKEN'"
        error = {"message": message, "type": "AuthenticationError", "field": None}
        refusal = JSONResponse(
            # The fields of every dialect's errors: a client must understand this one too.
            {"error": error | {"param": None, "code": 401}},
            status_code=401,
            headers={"WWW-Authenticate": "Bearer"},
        )
        await refusal(scope, receive, send)

    def _may_ask(self, scope: Scope) -> bool:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path in OPEN_PATHS:
            return True
        kind, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        if kind.lower() != "bearer":
            return False
        # All of them, so that the time says nothing about which one is nearly right.
        matches = [hmac.compare_digest(given.strip().encode(), token) for token in self._tokens]
        return any(matches)
