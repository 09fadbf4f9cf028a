"""The demo's side of the other job: starts its process, reads its events, tells it to stop."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from deploy.demo.records import BorrowedSlot
from placement.errors import UnavailableError

STOP_TIMEOUT_S = 40.0
"""Longer than the job's own bound for returning its slots."""

CHECKOUT = Path(__file__).parents[2]


class Borrowing:
    """A second driver process on the same cluster; a context manager, so that it always ends.

    Args:
        address: of the Ray cluster.
        slots: how many it asks for.
        log: its error output.
    """

    def __init__(self, address: str, slots: int, log: Path, limit_s: float) -> None:
        self._log = log.open("w")
        self._lock = threading.Lock()
        self._events: list[dict[str, Any]] = []
        self._ready = threading.Event()
        command = [sys.executable, "-m", "deploy.demo.borrower", "--address", address]
        self._process = subprocess.Popen(
            [*command, "--slots", str(slots), "--limit-s", str(limit_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=CHECKOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            # Ctrl-C is for the demo, which then ends this process in order.
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._reader = threading.Thread(
            target=self._read, args=(self._process.stdout,), name="borrower-events"
        )
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def wait_until_waiting(self, timeout_s: float) -> None:
        """Until its actors are pending.

        Raises:
            UnavailableError: it did not get that far.
        """
        if not self._ready.wait(timeout_s) or not self.events("waiting"):
            raise UnavailableError(
                f"the other job did not ask for its slots within {timeout_s:.0f} s; "
                f"its output is in {self._log.name}"
            )

    def stop(self) -> tuple[BorrowedSlot, ...]:
        """Tell it to return its slots and wait until its process has gone. Idempotent."""
        if self._process.poll() is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(STOP_TIMEOUT_S)
        self._reader.join(STOP_TIMEOUT_S)
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()
        return borrowed_slots(self.events())

    def events(self, name: str | None = None) -> tuple[dict[str, Any], ...]:
        """What it has told so far, oldest first."""
        with self._lock:
            return tuple(e for e in self._events if name in (None, e["event"]))

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            event = json.loads(line)
            with self._lock:
                self._events.append(event)
            self._ready.set()
        self._ready.set()  # it has ended: nobody need wait on


def borrowed_slots(events: Iterable[dict[str, Any]]) -> tuple[BorrowedSlot, ...]:
    """The other job's events as records; a slot that it never said to have returned is left
    out, because nobody then knows when it did."""
    by_slot: dict[str, dict[str, Any]] = {}
    for event in events:
        if "slot" in event:
            by_slot.setdefault(event["slot"], {"first_chunk_at": None}).update(event)
    return tuple(
        BorrowedSlot(
            node_id=told["node_id"],
            slot=slot,
            pid=told["pid"],
            started_at=told["started_at"],
            first_chunk_at=told["first_chunk_at"],
            returned_at=told["returned_at"],
            chunks=told["chunks"],
        )
        for slot, told in by_slot.items()
        if "returned_at" in told
    )
