"""What workers report, applied in order: one long poll in flight per worker.

Events are journaled before the next poll acknowledges them, so a coordinator that dies loses
none.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from actors.backlog import Backlog
from actors.crew import Crew
from actors.foresight import Foresight
from actors.kv_moves import KvMoves
from actors.protocol import Broken, Evicted, Tokens, WorkerReport
from actors.rebalancing import Rebalancing
from actors.reconfigure import Reconfiguration
from actors.roster import Worker
from placement.errors import FlexFloorError
from placement.ids import SampleId

_LOOK_AGAIN_S = 0.2
"""A sample that ended behind a report's events, or that has yet to enter at a step's boundary, is
missing in its count and not in that of the next one."""


class Listener(Protocol):
    """Who is told what workers report, beside the records that change."""

    @property
    def change(self) -> Reconfiguration | None:
        """The change in progress."""
        ...

    def wake(self) -> None:
        """There may be something to decide."""
        ...

    def lose_group(self, reason: str) -> None: ...


class Listening:
    """Args:
    foresight: is told how long steps take.
    rebalancing: is told of the samples that it asked for; None: there is none.
    """

    def __init__(
        self,
        crew: Crew,
        backlog: Backlog,
        moves: KvMoves,
        listener: Listener,
        foresight: Foresight | None,
        rebalancing: Rebalancing | None,
    ) -> None:
        self._rebalancing = rebalancing
        self._crew = crew
        self._backlog = backlog
        self._moves = moves
        self._listener = listener
        self._foresight = foresight
        self._clock: Callable[[], float] = crew.clock
        self.last_step_at = 0.0
        self.endings = 0
        """Samples that workers have ended: the measure of progress across restarts."""

    def listen(self, worker: Worker) -> None:
        worker.collecting = asyncio.ensure_future(self._collect(worker))

    async def catch_up(self, worker: Worker) -> None:
        """What a worker that was taken over has kept for us.

        A sample that nobody knows is cancelled there. What was bound and never got there, because
        the coordinator died in between, waits again. The group is given up if the worker does not
        have what the journal says it decoded.
        """
        for wait_s in (0.0, _LOOK_AGAIN_S, _LOOK_AGAIN_S):
            report = await worker.live.collect(worker.cursor, wait_s)
            await self._apply(worker, report)
            bound = self._backlog.running_on(worker.worker_id)
            if report.stats.running >= len(bound):
                return
        unheard_of = [record for record in bound if record.unheard_of]
        if report.stats.running == len(bound) - len(unheard_of):
            for record in unheard_of:
                self._backlog.let_go(record.sample.sample_id, worker.worker_id)
            return
        self._listener.lose_group(
            f"worker {worker.worker_id} runs {report.stats.running} samples, and {len(bound)} were "
            f"bound to it, of which {len(unheard_of)} got no token yet"
        )

    async def _collect(self, worker: Worker) -> None:
        wait_s = self._crew.settings.coordinator.collect_wait_s
        while True:
            try:
                await self._apply(worker, await worker.live.collect(worker.cursor, wait_s))
            except FlexFloorError as error:
                self.lose_worker(worker, str(error))
                return

    def lose_worker(self, worker: Worker, error: str) -> None:
        """A worker has ended, or its reports cannot be used."""
        if worker.leaving:
            return
        change = self._listener.change
        needed = change is not None and change.needs(worker.worker_id)
        if change is not None and change.can_absorb(worker.worker_id):
            change.lose(worker.worker_id, error)
        elif needed or worker.worker_id in self._crew.roster.members:
            self._listener.lose_group(error)

    async def _apply(self, worker: Worker, report: WorkerReport) -> None:
        """Raises:
        MembershipError: tokens are missing.
        UnavailableError: the journal could not be written for ten minutes.
        """
        self._take_stats(worker, report)  # first: an event may close the rollout that has the steps
        unwanted: list[SampleId] = []
        for event in report.events:
            if isinstance(event, Tokens):
                if not self._backlog.add_tokens(event) and event.finish_reason is None:
                    unwanted.append(event.sample_id)
                if event.finish_reason is not None:
                    self.endings += 1
                    self._listener.wake()
            elif isinstance(event, Broken):
                self.lose_worker(worker, f"worker {worker.worker_id}: {event.error}")
            else:
                change = self._listener.change
                if change is not None:
                    change.hear(worker.worker_id, event)
                if isinstance(event, Evicted):
                    self._let_go(event, worker)
                self._listener.wake()
        await self._backlog.until_written()
        worker.cursor = report.cursor
        if unwanted:
            await worker.live.cancel(list(dict.fromkeys(unwanted)))

    def _let_go(self, event: Evicted, source: Worker) -> None:
        """If the sample has to go on elsewhere, its KV may follow it."""
        if not self._backlog.let_go(event.sample_id, source.worker_id):
            return
        if self._rebalancing is not None and self._rebalancing.let_go(event, source):
            return
        change = self._listener.change
        if change is not None and source.worker_id in change.leavers:
            self._moves.offer(event, source)

    def _take_stats(self, worker: Worker, report: WorkerReport) -> None:
        stats = report.stats
        steps = worker.take_stats(stats)
        if stats.steps:
            self.last_step_at = max(self.last_step_at, self._clock() - stats.last_step_age_s)
        if worker.worker_id in self._crew.roster.members:
            self._crew.ledger.step(self._crew.roster.count_steps(worker, stats))
            worker.kv_capacity_tokens = stats.kv_capacity_tokens
        change = self._listener.change
        if change is not None:
            change.report.observe(worker, stats, steps, change.progress)
        elif self._foresight is not None and worker.worker_id in self._crew.roster.members[:1]:
            # All step alike, so one tells it of all.
            self._foresight.measured.add_steps(
                len(self._crew.roster.members), [s.seconds for s in steps], self._backlog.running
            )
        self._crew.telemetry.report(worker.worker_id, stats)
