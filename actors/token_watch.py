"""New tokens of many rollouts, awaited in one call.

A batch often comes as a rollout per sample, each with a client that streams. A call through Ray
costs about as much as a worker's whole report, so whoever serves many clients asks once for all.
"""

import asyncio
from collections.abc import Callable, Sequence

from actors.bell import Bell
from actors.rollout import Rollout
from actors.rollout_api import SampleNews, TokenWish
from placement.errors import FlexFloorError
from placement.ids import RolloutId

Told = tuple[SampleNews, ...] | FlexFloorError | None


class TokenWatch:
    """Args:
    find: the rollout of an id; raises if there is none.
    """

    def __init__(self, find: Callable[[RolloutId], Rollout]) -> None:
        self._find = find
        self._grown = Bell()

    def grew(self) -> None:
        """Some rollout has new tokens or an ending."""
        self._grown.ring()

    async def first_news(self, wishes: Sequence[TokenWish], wait_s: float) -> tuple[Told, ...]:
        """As soon as any of the wishes can be answered, all that can be; None for the others."""
        told = self._told(wishes)
        try:
            async with asyncio.timeout(wait_s):
                while all(one is None for one in told):
                    await self._grown.wait()
                    told = self._told(wishes)
        except TimeoutError:
            pass  # none of them has anything
        return told

    def _told(self, wishes: Sequence[TokenWish]) -> tuple[Told, ...]:
        return tuple(self._one(wish) for wish in wishes)

    def _one(self, wish: TokenWish) -> Told:
        try:
            rollout = self._find(wish.rollout_id)
            news = rollout.news_now(wish.known)
        except FlexFloorError as error:  # of this wish; the others are answered all the same
            return error
        return news if news or not rollout.open else None
