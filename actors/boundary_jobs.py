"""Work for the decode thread, to be done between two steps.

Bounded by its callers: each waits for its job, or posts one per call of the coordinator.
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from placement.errors import MembershipError

JOB_TIMEOUT_S = 120.0
"""Bound on a job's wait for the next step boundary: several collective timeouts."""


class BoundaryJobs:
    """Thread-safe; ``run`` is the decode thread's alone."""

    def __init__(self) -> None:
        self._jobs: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._changed = threading.Condition()
        self._closed = ""

    def post(self, job: Callable[[], Any]) -> "Future[Any]":
        """Raises: MembershipError: the decode thread has ended."""
        future: Future[Any] = Future()
        with self._changed:
            if self._closed:
                raise MembershipError(self._closed)
            self._jobs.append((job, future))
            self._changed.notify_all()
        return future

    def do(self, job: Callable[[], Any], timeout_s: float | None = JOB_TIMEOUT_S) -> Any:
        """Post ``job`` and wait for its result; raises what it raises."""
        return self.post(job).result(timeout_s)

    def run(self) -> None:
        while self._jobs:
            job, future = self._jobs.popleft()
            try:
                future.set_result(job())
            except Exception as error:  # noqa: BLE001 - it belongs to whoever posted the job
                future.set_exception(error)

    def close(self, reason: str) -> None:
        """Take no more jobs; those that wait fail with ``reason``."""
        with self._changed:
            self._closed = reason
            while self._jobs:
                self._jobs.popleft()[1].set_exception(MembershipError(reason))

    def wake(self) -> None:
        """Let ``wait`` look at its condition again."""
        with self._changed:
            self._changed.notify_all()

    def wait(self, or_until: Callable[[], bool], timeout_s: float | None = None) -> None:
        """Until there is a job or ``or_until`` holds."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._jobs) or or_until(), timeout_s)
