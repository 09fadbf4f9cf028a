"""Knows when the client of a request has gone."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Self, TypeVar

from starlette.types import Receive

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client closed its connection; nobody is left to answer."""


class ClientWatch:
    """Does work for as long as the client is there. The request's body must have been read."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive

    async def __aenter__(self) -> Self:
        self._gone = asyncio.create_task(self._until_disconnect())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._gone.cancel()

    async def _until_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def first(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work``, which is cancelled when the client goes before it is done.

        Raises: ClientGoneError.
        """
        task = asyncio.create_task(work)
        try:
            await asyncio.wait({task, self._gone}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise ClientGoneError from self._gone.exception()
        finally:
            task.cancel()
