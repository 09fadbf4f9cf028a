"""What the coordinator must not forget about rollouts: an append-only list of what happened.

An entry is appended before its effect is visible outside: a rollout is accepted, a token
acknowledged to its worker, an ending told to a client only after it is in the journal. So
replaying the entries rebuilds all rollouts, and what a worker still holds is never missing
before what it holds.

A journal that outlives its process takes time for that: ``append`` only says what comes next, and
whoever lets an effect out awaits ``written`` before.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from actors.rollout_api import CancelledBy, RolloutRequest, RolloutUsage
from actors.token_detail import TokenDetail
from placement.errors import UnavailableError
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


@dataclass(frozen=True, slots=True)
class Aborted:
    """All of a rollout is to end, with what it has."""

    rollout_id: RolloutId
    by: CancelledBy
    error: str
    at: float


@dataclass(frozen=True, slots=True)
class Closed:
    """What a rollout took, once its last sample has ended."""

    rollout_id: RolloutId
    usage: RolloutUsage


JournalEntry = Accepted | Bound | Generated | Ended | Aborted | Closed


@dataclass(frozen=True, slots=True)
class JournalFigures:
    """Since the journal was opened, but ``kept_bytes``: what it takes now."""

    written_bytes: int = 0
    writes: int = 0
    write_s: float = 0.0
    replayed: int = 0
    cut_bytes: int = 0
    kept_bytes: int = 0
    trouble: str = ""
    """Why what was appended cannot be written now."""


class Journal(Protocol):
    def append(self, entry: JournalEntry) -> None:
        """Raises (for ``Accepted`` only, and then nothing was appended):
        OverloadedError: it is full.
        UnavailableError: it cannot be written now.
        RequestError: the request holds what cannot be journaled.
        """
        ...

    async def written(self) -> None:
        """Returns when a restart would find all that was appended before the call.

        Raises:
            UnavailableError: it cannot be written now. Nothing is lost: the next call tries
                again.
        """
        ...

    def entries(self) -> Iterable[JournalEntry]:
        """All entries of rollouts that were not forgotten, oldest first within a rollout
        (rollouts do not depend on each other). Asked before anything is appended."""
        ...

    def forget(self, rollout_id: RolloutId) -> None:
        """An ended rollout can no longer be asked for."""
        ...

    def figures(self) -> JournalFigures: ...

    async def close(self) -> None:
        """Write what is left, and let go.

        Raises: UnavailableError.
        """
        ...


_log = logging.getLogger(__name__)

_RETRY_S = 0.5
_PATIENCE_S = 600.0
"""Somebody has to make room on a disk; until then everything stands still and nothing is lost."""


async def until_written(journal: Journal, clock: Callable[[], float]) -> None:
    """``journal.written``, tried again while the disk refuses, up to ten minutes.

    Raises: UnavailableError.
    """
    deadline, said = clock() + _PATIENCE_S, False
    while True:
        try:
            return await journal.written()
        except UnavailableError as error:
            if clock() >= deadline:
                raise
            if not said:
                _log.warning("%s; everything waits for it", error)
            said = True
        await asyncio.sleep(_RETRY_S)


class MemoryJournal:
    """A journal that lives as long as its process."""

    def __init__(self) -> None:
        self._entries_of: dict[RolloutId, list[JournalEntry]] = {}

    def append(self, entry: JournalEntry) -> None:
        if isinstance(entry, Accepted):
            self._entries_of[entry.rollout_id] = []
        self._entries_of[entry.rollout_id].append(entry)

    async def written(self) -> None:
        """It is as durable as it gets."""

    def entries(self) -> Iterable[JournalEntry]:
        for entries in self._entries_of.values():
            yield from entries

    def forget(self, rollout_id: RolloutId) -> None:
        del self._entries_of[rollout_id]

    def figures(self) -> JournalFigures:
        return JournalFigures()

    async def close(self) -> None:
        """There is nothing to let go of."""
