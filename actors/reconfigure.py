"""One change of the group, carried through the routine of ``placement.membership``.

Before anybody switches, every failure leaves the old membership as it was. Between the switch
and finalize the old membership can be restored as long as none of its members is lost; what
cannot be restored nor finished is a lost group, and whoever runs this begins afresh.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

from actors.backlog import Backlog
from actors.change_report import ChangeReport
from actors.concurrently import all_of, each_of, end
from actors.crew import Crew
from actors.crossing import Crossing, Verdict
from actors.kv_moves import KvMoves
from actors.protocol import Evicted, FinalizeReport, RolledBack, Switched, WorkerEvent
from actors.rollout_api import OperationStatus
from actors.roster import Worker
from placement.errors import FlexFloorError, MembershipError, WorkerLostError
from placement.experts import plan_group_change
from placement.ids import WorkerId
from placement.membership import ChangeProgress, GroupChange, Phase
from placement.views import WidthDecision

T = TypeVar("T")


class GroupLostError(MembershipError):
    """Neither the old nor the new membership can go on."""


class Reconfiguration:
    """Args:
    joiners: enlisted workers, not built yet.
    listen: begin to collect what a worker reports (joiners, once they are built).
    """

    def __init__(
        self,
        crew: Crew,
        backlog: Backlog,
        moves: KvMoves,
        decision: WidthDecision,
        joiners: list[Worker],
        decided_at: float,
        listen: Callable[[Worker], None],
    ) -> None:
        self._crew = crew
        self._listen = listen
        self._roster = crew.roster
        self._backlog = backlog
        self._moves = moves
        self._joiners = joiners
        self.leavers = frozenset(decision.leavers)
        self._old = crew.roster.member_workers()
        staying = [worker for worker in self._old if worker.worker_id not in self.leavers]
        self._new = staying + joiners
        self._leaving = [worker for worker in self._old if worker.worker_id in self.leavers]
        self.generation = crew.roster.new_generation()
        self.load = backlog.load
        """The load that it was decided for."""
        self.progress = ChangeProgress.begin(crew.clock())
        self.report = ChangeReport(
            self.generation,
            tuple(worker.worker_id for worker in self._old),
            tuple(worker.worker_id for worker in self._new),
            decision,
            decided_at,
            backlog.finished_ratio,
            staying[0] if staying else None,
            backlog.load_steps,
        )
        self._crossing = Crossing(
            [worker.worker_id for worker in staying],
            decision.leavers,
            [worker.worker_id for worker in joiners],
        )

    def status(self) -> OperationStatus:
        return self.report.status(self.progress, self._crew.clock())

    def can_absorb(self, worker_id: WorkerId) -> bool:
        """The loss of this worker is part of the change, not of a membership that stands."""
        if self.progress.phase is Phase.ROLLED_BACK:
            return False
        if self.progress.phase in (Phase.FINALIZE, Phase.DONE):
            return worker_id in self.leavers
        return any(worker.worker_id == worker_id for worker in self._old + self._joiners)

    def needs(self, worker_id: WorkerId) -> bool:
        """The new membership stands or is about to, and this worker is in it."""
        settled = self.progress.phase in (Phase.FINALIZE, Phase.DONE)
        return settled and any(worker.worker_id == worker_id for worker in self._new)

    def break_off(self, error: str) -> None:
        """The group was given up in the middle of it (or right behind it)."""
        now = self._crew.clock()
        if self.progress.ended:
            return
        if self.progress.phase is Phase.FINALIZE:
            self.progress.error = error
            self.report.broken_off_at = now
        else:
            self.progress.enter(Phase.ROLLED_BACK, now, error)

    def hear(self, worker_id: WorkerId, event: WorkerEvent) -> None:
        """A participant reported something."""
        if isinstance(event, Switched | RolledBack):
            if event.generation != self.generation:
                return
            if isinstance(event, Switched) and self.progress.phase is Phase.PAUSE:
                self.progress.enter(Phase.COMMIT, self._crew.clock())
            self._crossing.hear(worker_id, event)
        elif isinstance(event, Evicted) and worker_id in self.leavers:
            self.report.moved_samples.append(event.sample_id)

    def lose(self, worker_id: WorkerId, error: str) -> None:
        """A participant's process ended, or its collectives broke."""
        self._crossing.lose(worker_id, error)

    async def run(self) -> None:
        """Carry the change out, or take it back (``progress`` says which).

        Raises:
            GroupLostError: begin afresh.
        """
        self._limit_kv(self._crew.capacity.kv_tokens_at_width[len(self._new)])
        try:
            await self._run()
        finally:
            self._limit_kv(None)

    async def _run(self) -> None:
        try:
            others = await self._crew.others_now()
            joiner_ids = tuple(worker.worker_id for worker in self._joiners)
            await self._crew.store.record(
                self._roster.record(in_change=(*joiner_ids, *self.leavers))
            )
            if self._joiners:
                await self._build()
        except FlexFloorError as error:
            await self._give_up(error)
            return
        async with self._crew.membership:
            await self._replace_members(others)

    async def _replace_members(self, others: dict[str, float]) -> None:
        try:
            change = plan_group_change(
                self.generation,
                self._roster.members,
                tuple(worker.worker_id for worker in self._new),
                self._roster.owner_E,
            )
            change = replace(change, weight_version=self._roster.weights.version)
            await self._prepare(change)
        except FlexFloorError as error:
            await self._give_up(error)
            return
        await self._switch()
        verdict = await self._crossing.verdict(self._crew.settings.group.switch_timeout_s)
        if verdict is Verdict.BACK:
            verdict = await self._go_back()
        if verdict is Verdict.LOST:
            raise GroupLostError(
                f"the change to generation {self.generation} broke: {self._crossing.error}"
            )
        if verdict is Verdict.FORWARD:
            await self._finish(change, others)

    def _limit_kv(self, tokens: int | None) -> None:
        """From the decision on, nobody is given more than fits after the change."""
        for worker in self._old:
            worker.kv_limit_tokens = tokens

    async def _build(self) -> None:
        members = tuple(worker.worker_id for worker in self._new)
        await self._unless_lost(
            self._crew.build(self._joiners, members, self.generation, joiner=True),
            self._crew.settings.group.build_timeout_s,
            "building the joiners",
        )
        for worker in self._joiners:
            assert worker.build is not None
            self.report.detail("build", worker.build.phases_s)
            self._listen(worker)

    async def _prepare(self, change: GroupChange) -> None:
        self.progress.enter(Phase.PREPARE, self._crew.clock())
        self.report.begin_prepare(change)
        reports = await self._unless_lost(
            all_of(worker.live.prepare(change) for worker in self._old + self._joiners),
            self._crew.settings.group.prepare_timeout_s,
            "preparing the change",
        )
        self.report.received_bytes = sum(report.received_bytes for report in reports)
        for report in reports:
            self.report.detail("prepare", report.phases_s)

    async def _unless_lost(self, work: Coroutine[Any, Any, T], timeout_s: float, doing: str) -> T:
        """Raises:
        WorkerLostError: a participant was lost meanwhile.
        MembershipError: it took too long.
        """
        task = asyncio.ensure_future(work)
        loss = asyncio.ensure_future(self._crossing.loss.wait())
        try:
            await asyncio.wait({task, loss}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
        finally:
            await end(task, loss)
        if self._crossing.lost:
            raise WorkerLostError(self._crossing.error)
        raise MembershipError(f"{doing} took longer than {timeout_s} s")

    async def _give_up(self, error: FlexFloorError) -> None:
        """Nobody has switched: drop what was prepared and what joined."""
        failed_in = self.progress.phase
        all_dropped = failed_in is Phase.BUILD or await self._tell_all(self._old, "discard")
        if not all_dropped or self._crossing.old_member_lost:
            raise GroupLostError(self._crossing.error)
        self.progress.enter(Phase.ROLLED_BACK, self._crew.clock(), str(error))
        self._crew.telemetry.rollbacks.labels(failed_in).inc()
        await self._leave_no_trace()

    async def _switch(self) -> None:
        self.progress.enter(Phase.PAUSE, self._crew.clock())
        await self._tell_all(self._old + self._joiners, "switch")

    async def _tell_all(self, workers: list[Worker], what: str) -> bool:
        """Call ``what`` of this generation on each; one that does not answer is lost. Returns
        whether all did it."""
        calls = [getattr(worker.live, what)(self.generation) for worker in workers]
        outcomes = await each_of(calls)
        for worker, outcome in zip(workers, outcomes, strict=True):
            if isinstance(outcome, WorkerLostError):
                self.lose(worker.worker_id, str(outcome))
            elif isinstance(outcome, FlexFloorError):
                self._crossing.fail(f"{what} on worker {worker.worker_id}: {outcome}")
        return not any(isinstance(outcome, FlexFloorError) for outcome in outcomes)

    async def _go_back(self) -> Verdict:
        """Restore the old membership: whoever has not said that it is back is asked to be, and
        is when its answer comes."""
        failed_in = self.progress.phase
        self._crossing.fail("; ".join(self._crossing.lost.values()))
        elsewhere = [
            worker for worker in self._old if worker.worker_id not in self._crossing.rolled_back
        ]
        all_back = await self._tell_all(elsewhere, "rollback")
        if not all_back or self._crossing.old_member_lost:
            return Verdict.LOST
        self.progress.enter(Phase.ROLLED_BACK, self._crew.clock(), self._crossing.error)
        self._crew.telemetry.rollbacks.labels(failed_in).inc()
        await self._leave_no_trace()
        return Verdict.BACK

    async def _leave_no_trace(self) -> None:
        await self._crew.kill(self._joiners)
        await self._crew.store.forget_generation(self.generation)
        await self._crew.store.record(self._roster.record())

    async def _finish(self, change: GroupChange, others: dict[str, float]) -> None:
        """The new membership stands; whoever left gives its slot back."""
        store, old_generation = self._crew.store, self._roster.generation
        self.progress.enter(Phase.FINALIZE, self._crew.clock())
        survivors = [self._crossing.switched[worker_id] for worker_id in change.survivors]
        self.report.crossed(survivors or list(self._crossing.switched.values()))
        standing_by = [
            worker for worker in self._leaving if worker.worker_id not in self._crossing.lost
        ]
        participants = self._new + standing_by
        outcomes = await each_of(worker.live.finalize(self.generation) for worker in participants)
        for worker, outcome in zip(participants, outcomes, strict=True):
            if isinstance(outcome, FinalizeReport):
                worker.kv_capacity_tokens = outcome.kv_capacity_tokens
                self.report.detail("finalize", outcome.phases_s)
            elif worker in self._new:
                raise GroupLostError(f"finalize on worker {worker.worker_id}: {outcome}")
        self._roster.adopt(change)
        self.report.finalized_at = self._crew.clock()
        for worker in self._leaving:
            self._backlog.take_back(worker.worker_id)
        await store.record(self._roster.record(in_change=change.leavers))
        await all_of(self._release(worker, others) for worker in self._leaving)
        await store.forget_generation(old_generation)
        if self._leaving:
            await store.record(self._roster.record())
        self.progress.enter(Phase.DONE, self._crew.clock())
        self._crew.telemetry.changes.labels(self.report.decision.reason).inc()
        for phase, seconds in self.report.phases_s(self.progress, self._crew.clock()).items():
            if "." not in phase:
                self._crew.telemetry.phase_s.labels(phase).observe(seconds)

    async def _release(self, worker: Worker, others: dict[str, float]) -> None:
        await self._moves.until_fetched(worker)
        await self._crew.leave(worker)
        self._crew.slot_use.released(worker.lease.node_id, others)
        self._crew.telemetry.releases.labels(self.report.decision.reason).inc()
        self.report.add_release(worker)
