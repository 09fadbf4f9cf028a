"""What the participants of a change say and suffer, and what follows from it: go forward, go
back, or give the group up. It only listens and judges; ``actors.reconfigure`` acts.
"""

import asyncio
from collections.abc import Sequence
from enum import StrEnum

from actors.protocol import RolledBack, Switched
from placement.ids import WorkerId


class Verdict(StrEnum):
    FORWARD = "forward"
    BACK = "back"
    LOST = "lost"


class Crossing:
    """Args:
    survivors, leavers: the old members; joiners and survivors are the new ones.
    """

    def __init__(
        self,
        survivors: Sequence[WorkerId],
        leavers: Sequence[WorkerId],
        joiners: Sequence[WorkerId],
    ) -> None:
        self._survivors = tuple(survivors)
        self._leavers = tuple(leavers)
        self._joiners = tuple(joiners)
        self.switched: dict[WorkerId, Switched] = {}
        self.rolled_back: set[WorkerId] = set()
        self.lost: dict[WorkerId, str] = {}
        """Participants whose process ended or whose collectives broke, and how."""
        self.failure = ""
        self.loss = asyncio.Event()
        self._news = asyncio.Event()

    @property
    def error(self) -> str:
        return self.failure or "; ".join(self.lost.values())

    @property
    def old_member_lost(self) -> bool:
        return any(worker_id in self.lost for worker_id in self._survivors + self._leavers)

    def hear(self, worker_id: WorkerId, event: Switched | RolledBack) -> None:
        if isinstance(event, Switched):
            self.switched[worker_id] = event
        else:
            self.rolled_back.add(worker_id)
            self.fail(f"worker {worker_id} rolled back: {event.error}")
        self._news.set()

    def lose(self, worker_id: WorkerId, error: str) -> None:
        self.lost.setdefault(worker_id, error)
        self.loss.set()
        self._news.set()

    def fail(self, error: str) -> None:
        """The new generation cannot be; the first reason is kept."""
        self.failure = self.failure or error

    async def verdict(self, timeout_s: float) -> Verdict:
        """When all have crossed over or it is clear that they will not, within ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s):
                while (verdict := self._judge()) is None:
                    self._news.clear()
                    await self._news.wait()
                return verdict
        except TimeoutError:
            return self._judge_late(timeout_s)

    def _judge(self) -> Verdict | None:
        if any(worker_id in self.lost for worker_id in self._survivors):
            return Verdict.LOST
        if self.failure or any(worker_id in self.lost for worker_id in self._joiners):
            return Verdict.BACK
        leavers_done = all(w in self.switched or w in self.lost for w in self._leavers)
        return Verdict.FORWARD if leavers_done and self._new_members_crossed else None

    @property
    def _new_members_crossed(self) -> bool:
        return all(w in self.switched for w in self._survivors + self._joiners)

    def _judge_late(self, timeout_s: float) -> Verdict:
        everybody = self._survivors + self._leavers + self._joiners
        late = [worker_id for worker_id in everybody if worker_id not in self.switched]
        if self._new_members_crossed:  # nobody needs the leavers that are missing
            for worker_id in late:
                self.lose(worker_id, f"leaver {worker_id} did not stand by")
            return Verdict.FORWARD
        self.fail(f"workers {late} did not cross over within {timeout_s} s")
        return Verdict.BACK
