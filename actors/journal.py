"""What the coordinator must not forget about rollouts: an append-only list of what happened.

An entry is appended before its effect is visible outside: a rollout is accepted, a token
acknowledged to its worker, an ending told to a client only after it is in the journal. So
replaying the entries rebuilds all rollouts, and what a worker still holds is never missing
before what it holds.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from actors.rollout_api import CancelledBy, RolloutRequest
from actors.token_detail import TokenDetail
from placement.ids import RolloutId, SampleId, WorkerId
from placement.samples import FinishReason


@dataclass(frozen=True, slots=True)
class Accepted:
    """A rollout with all its samples."""

    rollout_id: RolloutId
    request: RolloutRequest
    at: float


@dataclass(frozen=True, slots=True)
class Bound:
    """A sample went to a worker; None: it came back to the queue."""

    rollout_id: RolloutId
    sample_id: SampleId
    worker_id: WorkerId | None
    at: float


@dataclass(frozen=True, slots=True)
class Generated:
    """New tokens of a sample; ``start`` is the index of the first one in the response."""

    rollout_id: RolloutId
    sample_id: SampleId
    start: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    detail: TokenDetail | None = None
    weight_version: str = "0"


@dataclass(frozen=True, slots=True)
class Ended:
    """A sample's one and only ending."""

    rollout_id: RolloutId
    sample_id: SampleId
    finish_reason: FinishReason
    error: str
    at: float
    cancelled_by: CancelledBy | None = None


JournalEntry = Accepted | Bound | Generated | Ended


class Journal(Protocol):
    def append(self, entry: JournalEntry) -> None: ...

    def entries(self) -> Iterable[JournalEntry]:
        """All entries of rollouts that were not forgotten, oldest first."""
        ...

    def forget(self, rollout_id: RolloutId) -> None:
        """An ended rollout can no longer be asked for."""
        ...


class MemoryJournal:
    """A journal that lives as long as its process."""

    def __init__(self) -> None:
        self._entries_of: dict[RolloutId, list[JournalEntry]] = {}

    def append(self, entry: JournalEntry) -> None:
        if isinstance(entry, Accepted):
            self._entries_of[entry.rollout_id] = []
        self._entries_of[entry.rollout_id].append(entry)

    def entries(self) -> Iterable[JournalEntry]:
        """Oldest rollout first; within a rollout oldest first (rollouts do not depend on each
        other)."""
        for entries in self._entries_of.values():
            yield from entries

    def forget(self, rollout_id: RolloutId) -> None:
        del self._entries_of[rollout_id]
