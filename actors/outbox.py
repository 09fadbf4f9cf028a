"""What a worker has to tell, kept until the coordinator has acknowledged it.

Events are numbered from 1. Bounded by what runs on the worker: at most ``max_samples`` samples
of ``max_model_len`` tokens between two acknowledgements, and a coordinator that stays away is
ended by the reaper.
"""

import threading
import time
from collections import deque

from actors.protocol import Tokens, WorkerEvent
from actors.token_detail import joined

BATCH_S = 0.1
"""Plain tokens wait so long for more, which keeps a worker at ten reports a second; whatever
decides something (an end, an eviction, a crossing) goes at once."""


class Outbox:
    """Thread-safe."""

    def __init__(self) -> None:
        self._events: deque[tuple[float, WorkerEvent]] = deque()
        self._acknowledged = 0
        self._urgent_at = 0
        self._changed = threading.Condition()

    def put(self, event: WorkerEvent) -> None:
        with self._changed:
            self._events.append((time.monotonic(), event))
            if not isinstance(event, Tokens) or event.finish_reason is not None:
                self._urgent_at = self._acknowledged + len(self._events)
            self._changed.notify_all()

    def collect(self, acknowledged: int, wait_s: float) -> tuple[int, tuple[WorkerEvent, ...]]:
        """(cursor, events after ``acknowledged``); waits up to ``wait_s`` for the first."""
        deadline = time.monotonic() + wait_s
        with self._changed:
            while self._acknowledged < acknowledged and self._events:
                self._events.popleft()
                self._acknowledged += 1
            while (left_s := self._wait_left_s(deadline)) > 0:
                self._changed.wait(left_s)
            events = _merged([event for _, event in self._events])
            return self._acknowledged + len(self._events), events

    def _wait_left_s(self, deadline: float) -> float:
        now = time.monotonic()
        if self._urgent_at > self._acknowledged:
            return 0.0
        if self._events:
            deadline = min(deadline, self._events[0][0] + BATCH_S)
        return deadline - now


def _merged(events: list[WorkerEvent]) -> tuple[WorkerEvent, ...]:
    """Consecutive tokens of one sample, from the same weights, as one event; the order of all
    else stays."""
    merged: list[WorkerEvent] = []
    open_at: dict[str, int] = {}
    for event in events:
        if not isinstance(event, Tokens):
            open_at.clear()
            merged.append(event)
            continue
        at = open_at.get(event.sample_id, -1)
        before = merged[at] if at >= 0 else None
        if isinstance(before, Tokens) and before.weight_version == event.weight_version:
            merged[at] = Tokens(
                event.sample_id,
                before.start,
                before.token_ids + event.token_ids,
                before.logprobs + event.logprobs,
                event.finish_reason,
                event.error,
                joined(before.detail, event.detail),
                event.weight_version,
            )
        else:
            open_at[event.sample_id] = len(merged)
            merged.append(event)
    return tuple(merged)
