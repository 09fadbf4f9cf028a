"""Rollouts that have to end by a given time, and end as aborted then.

One timer per open rollout that has a deadline; nothing is polled. An open rollout has samples,
and open samples are bounded, so timers are too.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from actors.concurrently import end
from actors.rollout import Rollout
from placement.ids import RolloutId


class Deadlines:
    """Args:
    clock: the one by which rollouts were accepted.
    expire: ends what is unfinished of a rollout.
    """

    def __init__(
        self, clock: Callable[[], float], expire: Callable[[Rollout], Coroutine[Any, Any, None]]
    ) -> None:
        self._clock = clock
        self._expire = expire
        self._timers: dict[RolloutId, asyncio.TimerHandle] = {}
        self._expiring: set[asyncio.Task[None]] = set()

    def watch(self, rollout: Rollout) -> None:
        """From its acceptance on, or when it was taken over."""
        if rollout.deadline_at is not None:
            self._timers[rollout.rollout_id] = asyncio.get_running_loop().call_later(
                max(0.0, rollout.deadline_at - self._clock()), self._over, rollout
            )

    def ended(self, rollout: Rollout) -> None:
        if timer := self._timers.pop(rollout.rollout_id, None):
            timer.cancel()

    def _over(self, rollout: Rollout) -> None:
        self._timers.pop(rollout.rollout_id, None)
        task = asyncio.ensure_future(self._expire(rollout))
        self._expiring.add(task)  # the loop itself keeps only weak references
        task.add_done_callback(self._expiring.discard)

    async def stop(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        await end(*self._expiring)
