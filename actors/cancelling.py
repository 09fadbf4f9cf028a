"""Ending samples before they have finished: with what they have, on the word of whoever asks.

A sample that waits ends at once. One that decodes ends when its worker has let go of it, so that
its partial has every token; a worker that does not answer in time is not waited for.
"""

from collections.abc import Sequence

from actors.backlog import Backlog
from actors.concurrently import each_of
from actors.crew import Crew
from actors.rollout import Rollout
from actors.rollout_api import CancelledBy
from actors.sample_record import Cancellation, SampleRecord
from placement.ids import SampleId, WorkerId

_LET_GO_S = 10.0  # a worker lets go at its next step boundary; a step is far shorter


class Cancelling:
    def __init__(self, crew: Crew, backlog: Backlog) -> None:
        self._crew = crew
        self._backlog = backlog

    async def cancel(
        self, rollout: Rollout, records: Sequence[SampleRecord], by: CancelledBy, error: str = ""
    ) -> None:
        """End those of a rollout's samples that are unfinished; returns when they have ended."""
        decoding: dict[WorkerId, list[SampleId]] = {}
        for record in records:
            if record.finish_reason is not None:
                continue
            if record.worker_id is None:
                self._backlog.cancel(record, by, error)
                continue
            record.cancellation = Cancellation(by, error)
            decoding.setdefault(record.worker_id, []).append(record.sample.sample_id)
        workers = self._crew.roster.workers
        await each_of(
            workers[worker_id].live.cancel(sample_ids) for worker_id, sample_ids in decoding.items()
        )
        await self._until_ended(rollout, records)
        for record in records:
            if record.finish_reason is None:
                # Its worker did not answer in time; what it still has of the sample is refused.
                self._backlog.cancel(record, by, error)

    async def _until_ended(self, rollout: Rollout, records: Sequence[SampleRecord]) -> None:
        deadline = self._crew.clock() + _LET_GO_S
        while any(record.finish_reason is None for record in records):
            if (remaining_s := deadline - self._crew.clock()) <= 0:
                return
            await rollout.wait_for_ending(rollout.num_ended, remaining_s)
