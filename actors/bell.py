"""Wakes whoever waits for something to happen, and costs next to nothing while nobody does."""

import asyncio


class Bell:
    """Of one event loop. Look whether it has happened before each wait: a ring is not kept."""

    def __init__(self) -> None:
        self._next: asyncio.Event | None = None

    def ring(self) -> None:
        if self._next is not None:
            self._next.set()
            self._next = None

    async def wait(self) -> None:
        """Until the next ring."""
        if self._next is None:
            self._next = asyncio.Event()
        await self._next.wait()
