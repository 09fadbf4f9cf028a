"""The KV of samples that a worker let go: where it still lies, and how it follows its sample.

A leaver stays until whoever gets its samples has their KV, or until it is given up: a sample
that finds no room in the turn after it was let go is recomputed when it finds some, so that no
slot is held for it. Whatever goes wrong on the way ends in recomputing, which needs nobody.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from actors.crew import Crew
from actors.protocol import Evicted, StepStats
from actors.roster import Worker
from actors.sample_kv import FetchedKv
from placement.errors import FlexFloorError
from placement.ids import SampleId
from placement.sample_moves import (
    CopySpeed,
    MoveChoice,
    MovePolicy,
    MoveReason,
    MoveView,
    choose_move,
)
from placement.samples import Sample

_log = logging.getLogger(__name__)

_REMEMBERED_COPIES = 16


@dataclass(frozen=True, slots=True)
class _Kept:
    source: Worker
    reason: MoveReason


class KvMoves:
    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._policy = MovePolicy(crew.settings.group.move_samples_by)
        self._limit_s = crew.settings.group.leave_timeout_s
        self._kept: dict[SampleId, _Kept] = {}
        """Samples whose KV is to be fetched."""
        self._copies: deque[tuple[int, float]] = deque(maxlen=_REMEMBERED_COPIES)
        """Bytes and seconds of the last ones, from the fetch until they were handed over."""
        self._changed = asyncio.Event()

    def choose(self, kv_tokens: int) -> MoveChoice:
        """How a sample with KV of so many tokens would move now."""
        return choose_move(self._view(kv_tokens), self._policy)

    def offer(self, event: Evicted, source: Worker, choice: MoveChoice | None = None) -> None:
        """A worker let go of a sample, which is to go on elsewhere.

        Args:
            choice: how it was to get its KV again, where that was decided before; it has to be
                recomputed if there is none.
        """
        if choice is None or (choice.copies and not event.kv_tokens):
            choice = self.choose(event.kv_tokens)
        if choice.copies:
            self._kept[event.sample_id] = _Kept(source, choice.reason)
        else:
            self._crew.telemetry.moved_samples.labels("recompute", choice.reason).inc()

    async def submit(self, worker: Worker, samples: list[Sample]) -> None:
        """Give samples to ``worker``, those whose KV is kept somewhere together with it.

        Raises: WorkerLostError: ``worker`` is gone.
        """
        plain = [sample for sample in samples if sample.sample_id not in self._kept]
        moved: dict[Worker, list[Sample]] = {}
        for sample in samples:
            if sample.sample_id in self._kept:
                moved.setdefault(self._kept[sample.sample_id].source, []).append(sample)
        try:
            if plain:
                await worker.live.submit(plain)
            for source, theirs in moved.items():
                started_at = self._crew.clock()
                kv = await self._fetch(source, [sample.sample_id for sample in theirs])
                await worker.live.submit(theirs, kv)
                if kv is not None and kv.num_bytes:
                    self._time_copy(kv.num_bytes, self._crew.clock() - started_at)
        finally:
            self.give_up(sample.sample_id for sample in samples)

    async def _fetch(self, source: Worker, sample_ids: list[SampleId]) -> FetchedKv | None:
        try:
            async with asyncio.timeout(self._limit_s):
                kv = await source.live.fetch_kv(sample_ids)
        except (TimeoutError, FlexFloorError) as error:
            _log.warning("worker %d gave no KV away: %s", source.worker_id, error or "too late")
            return None
        for sample_id in kv.sample_ids:
            kept = self._kept.pop(sample_id, None)
            if kept is not None:  # else the leaver waited too long, and that was counted
                self._crew.telemetry.moved_samples.labels("copy", kept.reason).inc()
        self._tell()
        return kv

    def kept(self) -> set[SampleId]:
        """Samples whose KV is to be fetched, if they find room in this turn."""
        return set(self._kept)

    def give_up(self, sample_ids: Iterable[SampleId]) -> None:
        """Those that are still kept will be recomputed."""
        for sample_id in sample_ids:
            if self._kept.pop(sample_id, None) is not None:
                labels = ("recompute", MoveReason.NO_KV)
                self._crew.telemetry.moved_samples.labels(*labels).inc()
        self._tell()

    async def until_fetched(self, leaver: Worker) -> None:
        """Until nobody waits for KV of ``leaver`` any more, or too long."""
        try:
            async with asyncio.timeout(self._limit_s):
                while any(kept.source is leaver for kept in self._kept.values()):
                    await self._changed.wait()
        except TimeoutError:
            self.give_up([i for i, kept in self._kept.items() if kept.source is leaver])

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # What the two ways cost

    def _view(self, kv_tokens: int) -> MoveView:
        facts = self._crew.capacity.facts
        num_blocks = -(-kv_tokens // facts.kv_block_tokens)
        return MoveView(
            kv_tokens=kv_tokens,
            kv_bytes=num_blocks * facts.kv_block_bytes,
            copy_speed=self.copy_speed(),
            prefill_s_per_token=self.prefill_s_per_token(),
        )

    def _stats(self) -> list[StepStats]:
        return [w.stats for w in self._crew.roster.workers.values() if w.stats is not None]

    def _time_copy(self, num_bytes: int, took_s: float) -> None:
        self._copies.append((num_bytes, took_s))
        self._crew.telemetry.moved_kv_bytes.inc(num_bytes)
        self._crew.telemetry.moved_kv_s.inc(took_s)

    def copy_speed(self) -> CopySpeed | None:
        """The copies seen here, and what filling blocks took the workers."""
        if not self._copies:
            return None
        filled_bytes = sum(stats.copied_kv_bytes for stats in self._stats())
        filled_s = sum(stats.copied_kv_s for stats in self._stats())
        return CopySpeed(
            least_s=min(seconds for _, seconds in self._copies),
            s_per_byte=min(seconds / num_bytes for num_bytes, seconds in self._copies)
            + (filled_s / filled_bytes if filled_bytes else 0.0),
        )

    def prefill_s_per_token(self) -> float | None:
        """Of samples that were recomputed; None before the first."""
        tokens = sum(stats.prefilled_tokens for stats in self._stats())
        return sum(stats.prefill_s for stats in self._stats()) / tokens if tokens else None
