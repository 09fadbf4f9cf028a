"""One call to the coordinator for all the streams of this replica that wait for tokens.

A report of a worker answers most of them at once, and they ask again at once: so they share the
next call, too. One that begins to wait meanwhile gets a call of its own and shares afterwards.
"""

import asyncio

from actors.rollout_api import CoordinatorPort, SampleNews, TokenWish
from placement.errors import FlexFloorError

GATHER_S = 0.005
"""Who asks within so long of each other shares a call; workers report every 0.1 s."""


class TokenPolls:
    """Args:
    wait_s: longest wait of a call.
    """

    def __init__(self, coordinator: CoordinatorPort, wait_s: float) -> None:
        self._coordinator = coordinator
        self._wait_s = wait_s
        self._asked: list[tuple[TokenWish, asyncio.Future[tuple[SampleNews, ...]]]] = []
        self._calls: set[asyncio.Task[None]] = set()

    async def next_tokens(self, wish: TokenWish) -> tuple[SampleNews, ...]:
        """What is beyond the wish; nothing if there was none when others were answered, or at the
        bound: ask again then.

        Raises: RequestError, UnknownIdError, UnavailableError.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[tuple[SampleNews, ...]] = loop.create_future()
        self._asked.append((wish, answer))
        if len(self._asked) == 1:
            loop.call_later(GATHER_S, self._begin_call)
        return await answer

    def _begin_call(self) -> None:
        asked, self._asked = self._asked, []
        task = asyncio.create_task(self._call(asked))
        self._calls.add(task)  # the loop itself keeps only weak references
        task.add_done_callback(self._calls.discard)

    async def _call(
        self, asked: list[tuple[TokenWish, asyncio.Future[tuple[SampleNews, ...]]]]
    ) -> None:
        waiting = [(wish, answer) for wish, answer in asked if not answer.done()]
        if not waiting:
            return  # all have left meanwhile
        try:
            told = await self._coordinator.tokens_of(
                tuple(wish for wish, _ in waiting), self._wait_s
            )
        except FlexFloorError as error:
            told = (error,) * len(waiting)
        for (_, answer), news in zip(waiting, told, strict=True):
            if answer.done():
                continue
            if isinstance(news, FlexFloorError):
                answer.set_exception(news)
            else:
                answer.set_result(news or ())
