"""An event loop whose clock jumps to the next timer: minutes of waiting take no time.

Everything in such a test waits through the loop, so the order of events does not depend on
the machine. A loop with nothing left to wait for is a deadlock, and says so.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_START_S = 1_000_000.0
_BOUND_S = 3600.0


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = _START_S

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if ready:
            return ready
        if timeout is None:
            raise AssertionError("deadlock: nothing is scheduled and nothing can happen")
        self.now_s += max(0.0, timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


def clock() -> float:
    return asyncio.get_running_loop().time()


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a test to its end, or fail after an hour of its own time."""

    async def bounded() -> T:
        return await asyncio.wait_for(main, _BOUND_S)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(bounded())


async def until(condition: Callable[[], bool], what: str, bound_s: float = 600.0) -> None:
    """Look at each hundredth of a virtual second."""
    deadline = clock() + bound_s
    while not condition():
        assert clock() < deadline, f"it did not happen within {bound_s} s: {what}"
        await asyncio.sleep(0.01)
