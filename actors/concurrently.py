"""Several calls to workers at once, with one end: nothing is left running behind a failure."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

from placement.errors import FlexFloorError

T = TypeVar("T")


async def all_of(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results in order. The first failure is raised after the other calls were cancelled and
    have ended."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await end(*tasks)


async def each_of(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T | FlexFloorError]:
    """Results or errors in order: every call is made to its end, whatever happens to others."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        await end(*tasks)
    answers: list[T | FlexFloorError] = []
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, FlexFloorError):
            raise outcome
        answers.append(outcome)
    return answers


async def end(*tasks: "asyncio.Task[Any] | None") -> None:
    """Cancel tasks and wait until they have ended; how they ended is not asked."""
    alive = [task for task in tasks if task is not None and not task.done()]
    for task in alive:
        task.cancel()
    if alive:
        await asyncio.wait(alive)
