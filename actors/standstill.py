"""Work on the group as a whole, done by the loop that steers it, between two of its decisions.

While it runs nobody is given samples, and no change of the group is under way, except that workers
which are to join may be started: that touches no member.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from placement.errors import UnavailableError

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Visit:
    work: Callable[[], Awaitable[Any]]
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    outcome: "asyncio.Future[Any]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def fail(self, error: Exception) -> None:
        self.outcome.set_exception(error)
        self.outcome.exception()  # its caller may have gone, and then nobody else looks


class Standstill:
    """Args:
    wake: asks the loop for a turn.
    membership: held by a change of the group, from its preparation to its end.
    """

    def __init__(self, wake: Callable[[], None], membership: asyncio.Lock) -> None:
        self._wake = wake
        self._membership = membership
        self._waiting: deque[_Visit] = deque()

    async def do(self, work: Callable[[], Awaitable[T]], wait_s: float) -> T:
        """``work``'s result, once its turn has come.

        Raises:
            UnavailableError: its turn did not come within ``wait_s``, or the loop was stopped.
            Exception: as ``work`` raised it.
        """
        visit = _Visit(work)
        self._waiting.append(visit)
        self._wake()
        try:
            async with asyncio.timeout(wait_s):
                await visit.begun.wait()
        except TimeoutError:
            raise UnavailableError(
                f"the group did not come to rest within {wait_s:g} s: a change of it, or a start, "
                "is still under way; try again"
            ) from None
        finally:
            if visit in self._waiting:
                self._waiting.remove(visit)
        return await asyncio.shield(visit.outcome)

    async def run(self) -> None:
        """The loop's part: all that waits, one after the other, unless a change is under way."""
        if self._membership.locked():
            return
        async with self._membership:
            await self._run()

    async def _run(self) -> None:
        while self._waiting:
            visit = self._waiting.popleft()
            visit.begun.set()
            try:
                result = await visit.work()
            except Exception as error:  # noqa: BLE001 - it belongs to whoever waits for the work
                visit.fail(error)
            except asyncio.CancelledError:
                visit.fail(UnavailableError("the service was shut down"))
                raise
            else:
                visit.outcome.set_result(result)
