"""The client's HTTP requests: one try each, what went wrong as an error of our tree, and how long
to wait before another try."""

import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from placement.errors import (
    FlexFloorError,
    OverloadedError,
    RequestError,
    UnavailableError,
    UnknownIdError,
)

_KINDS: dict[int, type[FlexFloorError]] = {404: UnknownIdError, 429: OverloadedError}


class TryAgainError(UnavailableError):
    """The request did not get through, or not now; sent again, it may."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message, field=field)
        self.after_s: float | None = None
        """When the service wants to be asked again, if it said so."""
        self.busy = False
        """Its queue is full: an error of the caller's load, not of the service."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How often a request that fails is sent again, and when.

    Attributes:
        attempts: in a row without anything new; then the error is the caller's.
    """

    attempts: int = 6
    first_pause_s: float = 0.25
    longest_pause_s: float = 15.0

    def pause_s(self, failures: int, error: TryAgainError) -> float:
        """Raises: ``error``, where it is not worth another try."""
        if failures >= self.attempts:
            if error.busy:
                raise OverloadedError(error.message) from error
            raise error
        if error.after_s is not None:
            return min(error.after_s, self.longest_pause_s)
        # Spread out: clients that lost the same service come back one after the other.
        longest_s = min(self.first_pause_s * 2 ** (failures - 1), self.longest_pause_s)
        return random.uniform(longest_s / 2, longest_s)


class Calls:
    """Args:
    http: with the service's address, and its token if it wants one.
    """

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def answer(
        self, method: str, path: str, *, body: Any = None, answers: tuple[int, ...] = ()
    ) -> bytes:
        """Args:
            answers: statuses that are answers and no errors, beside those below 400.

        Raises: TryAgainError, or what the service says is wrong.
        """
        try:
            response = await self._http.request(method, path, json=body)
        except httpx.TransportError as error:
            raise _lost(path, error) from error
        if response.status_code not in answers:
            check_answer(response.status_code, response.headers, response.content)
        return response.content

    @asynccontextmanager
    async def lines(
        self, method: str, path: str, *, body: Any = None, **params: Any
    ) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        """The lines of one answer, as they come.

        Raises: as ``answer``, also while they are read.
        """
        try:
            async with self._http.stream(method, path, json=body, params=params or None) as got:
                if not got.is_success:
                    check_answer(got.status_code, got.headers, await got.aread())
                yield _parsed(got)
        except httpx.TransportError as error:
            raise _lost(path, error) from error


async def _parsed(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for text in response.aiter_lines():
        try:
            line: dict[str, Any] = json.loads(text)
        except ValueError as error:  # the connection ended in the middle of it
            raise TryAgainError(f"an answer broke off in a line of {len(text)} bytes") from error
        if line["type"] == "error":
            raise _as_error(503, line)
        yield line


def _lost(path: str, error: httpx.TransportError) -> TryAgainError:
    return TryAgainError(
        f"the connection for {path} was lost ({type(error).__name__}: {error}); see whether the "
        "service runs at this address"
    )


def check_answer(code: int, headers: httpx.Headers, content: bytes) -> None:
    """Raises: what the service says, as an error of our tree."""
    if code < 400:
        return
    try:
        told = json.loads(content)
    except ValueError:
        told = None
    error = _as_error(code, told)
    if isinstance(error, TryAgainError):
        after = headers.get("retry-after", "")
        error.after_s = float(after) if after.isdigit() else None
        error.busy = code == 429
    raise error


def _as_error(code: int, told: Any) -> FlexFloorError:
    content = told.get("error") if isinstance(told, dict) else None
    if isinstance(content, dict):
        message, field = str(content.get("message")), content.get("field")
    else:
        message, field = f"the service answered {code} without saying why", None
    if code in (429, 502, 503, 504):
        return TryAgainError(message, field=field)
    return _KINDS.get(code, RequestError if code < 500 else UnavailableError)(message, field=field)
