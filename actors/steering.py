"""The coordinator's decisions carried out: who decodes what, how wide the group is, and what
happens when it is lost.

One loop, woken by what happens, takes one turn at a time: begin afresh if the group is lost,
bind queued samples, then at most one change of the group. Waiting for leases goes on beside
it, so that a group that wants to grow can still shrink.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from actors.attempts import Attempts
from actors.backlog import Backlog
from actors.concurrently import all_of, each_of, end
from actors.crew import Crew
from actors.founding import attach_group, found_group
from actors.listening import Listening
from actors.outlook import view_for_dispatch, view_for_width
from actors.ports import WorkerFactory
from actors.reconfigure import GroupLostError, Reconfiguration
from actors.rollout_api import Strategy
from actors.roster import Worker
from placement.dispatch import assign_static_chunks, plan_static_chunks
from placement.errors import ConfigError, FlexFloorError, ModelRefusedError, WorkerLostError
from placement.ids import SampleId, WorkerId
from placement.membership import Phase
from placement.release import IdlePolicy, ReleaseRule
from placement.samples import FinishReason
from placement.views import DispatchPlan, GroupView, WidthDecision

_log = logging.getLogger(__name__)

_HEARTBEAT_S = 1.0  # decisions follow events; this only bounds what a missed one costs
_MAX_CHANGE_FAILURES = 5
_MAX_RESTARTS = 3
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0


class Steering:
    def __init__(
        self,
        crew: Crew,
        backlog: Backlog,
        dispatch: Callable[[GroupView], DispatchPlan],
        release_rule: ReleaseRule,
    ) -> None:
        self._crew = crew
        self._backlog = backlog
        self._dispatch_rule = dispatch
        self._release_rule = release_rule
        self.listening = Listening(crew, backlog, self)
        self.change: Reconfiguration | None = None
        self.operations: deque[Reconfiguration] = deque(
            maxlen=crew.settings.coordinator.max_kept_operations
        )
        self.waiting_for = ""
        self.wanted_workers = crew.settings.group.max_workers
        self._wakeup = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None
        self._carrying: asyncio.Task[None] | None = None
        self._acquiring: asyncio.Task[list[Worker]] | None = None
        self._acquiring_since = 0.0
        self._alarm: asyncio.TimerHandle | None = None
        self._lost = ""
        self._keep_group = True
        self._seen_endings = 0
        self._asked = False
        """A rollout was accepted since the start: before that the idle policy has no say."""
        interval_s = crew.settings.coordinator.min_reconfigure_interval_s
        self._changes = self._attempts(_MAX_CHANGE_FAILURES, max(interval_s, _FIRST_PAUSE_S))
        self._growths = self._attempts(_MAX_CHANGE_FAILURES, _FIRST_PAUSE_S)
        self._restarts = self._attempts(_MAX_RESTARTS, _FIRST_PAUSE_S)

    def _attempts(self, limit: int, first_pause_s: float) -> Attempts:
        return Attempts(limit, first_pause_s, _LONGEST_PAUSE_S, self._crew.clock)

    async def start(self, factory: WorkerFactory) -> None:
        """Take a group over or found one, then begin to decide.

        Raises: as ``found_group``.
        """
        if await attach_group(self._crew, factory):
            workers = self._crew.roster.member_workers()
            await all_of(self.listening.catch_up(worker) for worker in workers)
        else:
            await self._found()
        self._backlog.take_back_strays(self._crew.roster.members)
        for worker in self._crew.roster.member_workers():
            self.listening.listen(worker)
        self._loop = asyncio.ensure_future(self._run())
        self._loop.add_done_callback(self._loop_ended)
        self.wake()

    async def stop(self) -> None:
        """Decide nothing more; whatever was under way is broken off."""
        self._wake_in(0)
        await end(self._loop, self._carrying, self._acquiring)

    @property
    def broken(self) -> str:
        """Why no decisions are made any more, if that is so."""
        if self._loop is None or not self._loop.done() or self._loop.cancelled():
            return ""
        return f"the coordinator's loop ended: {self._loop.exception()!r}"

    def wake(self) -> None:
        self._wakeup.set()

    def accepted(self) -> None:
        """There is new work: whatever was given up is worth another try."""
        self._asked = self._keep_group = True
        for attempts in (self._changes, self._growths, self._restarts):
            attempts.reset()
        self.wake()

    def lose_group(self, reason: str) -> None:
        self._lost = self._lost or reason
        self.wake()

    def _say(self, text: str) -> None:
        self.waiting_for = text

    def _loop_ended(self, loop: asyncio.Task[None]) -> None:
        if not loop.cancelled():
            _log.error("%s", self.broken, exc_info=loop.exception())
            self._backlog.end_all_open(FinishReason.FAILED, self.broken)

    async def _run(self) -> None:
        while True:
            await asyncio.wait(
                [wakeup := asyncio.ensure_future(self._wakeup.wait())], timeout=_HEARTBEAT_S
            )
            await end(wakeup)
            self._wakeup.clear()
            await self._turn()

    async def _turn(self) -> None:
        self._reap_change()
        if self.listening.endings > self._seen_endings:
            self._seen_endings = self.listening.endings
            self._restarts.reset()
        if self._lost:
            await self._give_group_up()
        if not self._crew.roster.members:
            await self._found_again()
        if self._crew.roster.members and not self._lost:
            await self._dispatch()
            await self._steer_width()

    # The group as a whole

    async def _found(self) -> None:
        await found_group(self._crew, self._say)
        self.waiting_for = ""

    async def _found_again(self) -> None:
        if not (self._backlog.num_open or self._keep_group) or not self._restarts.may_try:
            self._wake_in(self._restarts.pause_s)
            return
        try:
            await self._found()
        except FlexFloorError as error:
            _log.warning("the group could not be founded: %s", error)
            self.waiting_for = str(error)
            self._restarts.fail()
            if self._restarts.exhausted or isinstance(error, ConfigError | ModelRefusedError):
                self._fail_open(str(error))
            self._wake_in(self._restarts.pause_s)
            return
        for worker in self._crew.roster.member_workers():
            self.listening.listen(worker)

    def _fail_open(self, reason: str) -> None:
        self._keep_group = False
        self._backlog.end_all_open(
            FinishReason.FAILED, f"the group was lost and not recovered: {reason}"
        )

    async def _give_group_up(self) -> None:
        """End what is left of a lost group; its samples wait with the tokens they have."""
        reason, roster = self._lost, self._crew.roster
        _log.warning("the group of generation %d is given up: %s", roster.generation, reason)
        self.waiting_for = f"a new group, after the last one was lost: {reason}"
        await end(self._carrying, self._acquiring)
        if self.change is not None and not self.change.progress.ended:
            self.change.break_off(reason)
        self.change = self._carrying = self._acquiring = None
        workers = list(roster.workers.values())
        for worker in workers:
            self._backlog.take_back(worker.worker_id)
        roster.disband()
        await self._crew.kill(workers)
        self._backlog.unpin_static()
        self._crew.telemetry.restarts.inc()
        self._lost = ""
        self._restarts.fail()
        if self._restarts.exhausted:
            self._fail_open(reason)

    # Samples to workers

    async def _dispatch(self) -> None:
        leaving = self._leaving()
        if self._backlog.num_queued and len(leaving) < len(self._crew.roster.members):
            bound = self._bind(
                self._dispatch_rule(
                    view_for_dispatch(self._crew, self._backlog, Strategy.ELASTIC, leaving)
                )
            )
            self._pin_static()
            if chunk_worker := self._backlog.chunk_worker():
                view = view_for_dispatch(self._crew, self._backlog, Strategy.STATIC, leaving)
                for worker_id, ids in self._bind(plan_static_chunks(view, chunk_worker)).items():
                    bound.setdefault(worker_id, []).extend(ids)
            await each_of(self._submit(worker_id, ids) for worker_id, ids in bound.items())
        if not self._backlog.num_queued and self._acquiring is None:
            self.waiting_for = ""

    def _leaving(self) -> frozenset[WorkerId]:
        """Who gets no more samples: leavers, from the decision on."""
        if self.change is None or self.change.progress.ended:
            return frozenset()
        return self.change.leavers

    def _bind(self, plan: DispatchPlan) -> dict[WorkerId, list[SampleId]]:
        bound: dict[WorkerId, list[SampleId]] = {}
        for binding in plan.bindings:
            self._backlog.bind(self._backlog.record(binding.sample_id), binding.worker_id)
            bound.setdefault(binding.worker_id, []).append(binding.sample_id)
        return bound

    async def _submit(self, worker_id: WorkerId, sample_ids: list[SampleId]) -> None:
        worker = self._crew.roster.workers[worker_id]
        samples = [self._backlog.record(sample_id).to_submit() for sample_id in sample_ids]
        try:
            await worker.live.submit(samples)
        except WorkerLostError as error:
            self.listening.lose_worker(worker, str(error))

    def _pin_static(self) -> None:
        """Chunks are cut once the group is as wide as it will get."""
        members = self._crew.roster.members
        full = len(members) == self._crew.settings.group.max_workers
        if self.change is None and (full or self._growths.failures or self._changes.exhausted):
            for rollout in self._backlog.open_rollouts():
                if rollout.request.strategy is Strategy.STATIC and rollout.chunk_worker is None:
                    rollout.chunk_worker = assign_static_chunks(list(rollout.records), members)

    # The width of the group

    async def _steer_width(self) -> None:
        if self.change is not None:
            return
        decision = self._release_rule(view_for_width(self._crew, self._backlog), self._policy())
        now_wide = len(self._crew.roster.members)
        self.wanted_workers = decision.width
        arrived = self._take_arrived()
        if arrived is not None:
            joiners = arrived[: max(0, decision.width - now_wide)]
            await self._crew.kill(arrived[len(joiners) :])
            if joiners:
                self._begin(decision, joiners, self._acquiring_since)
                return
        if decision.width > now_wide:
            if self._acquiring is None and self._growths.may_try and self._changes.may_try:
                self._acquiring_since = self._crew.clock()
                self._acquiring = asyncio.ensure_future(self._acquire(decision.width - now_wide))
        elif decision.width == 0:
            await self._disband()
            return
        elif decision.width < now_wide and self._changes.may_try:
            self._begin(decision, [], self._crew.clock())
        self._wake_in(max(self._changes.pause_s, self._growths.pause_s))

    def _policy(self) -> IdlePolicy:
        return IdlePolicy(self._crew.settings.group.idle_workers if self._asked else "all")

    async def _acquire(self, count: int) -> list[Worker]:
        def still_wanted() -> bool:
            return self.wanted_workers > len(self._crew.roster.members)

        try:
            return await self._crew.acquire(count, 1, self._say, still_wanted)
        finally:
            self.wake()

    def _take_arrived(self) -> list[Worker] | None:
        """Workers whose leases have arrived; None while there are none to place."""
        if self._acquiring is None or not self._acquiring.done():
            return None
        acquiring, self._acquiring = self._acquiring, None
        arrived = acquiring.result()
        if arrived:
            self._growths.reset()
        else:
            self._growths.fail()
        return arrived

    def _begin(self, decision: WidthDecision, joiners: list[Worker], decided_at: float) -> None:
        _log.info("%s: %s", decision.reason, decision.explanation)
        self.change = Reconfiguration(
            self._crew, self._backlog, decision, joiners, decided_at, self.listening.listen
        )
        self.operations.append(self.change)
        self._carrying = asyncio.ensure_future(self.change.run())
        self._carrying.add_done_callback(lambda _: self.wake())

    def _reap_change(self) -> None:
        """Draw the consequences of a change that has ended."""
        if self.change is None or self._carrying is None or not self._carrying.done():
            return
        error = None if self._carrying.cancelled() else self._carrying.exception()
        ended, self.change, self._carrying = self.change, None, None
        if error is not None:
            ended.break_off(str(error))
            if not isinstance(error, GroupLostError):
                _log.error("a change of the group failed", exc_info=error)
            self.lose_group(str(error))
        elif ended.progress.phase is Phase.ROLLED_BACK:
            _log.warning("rolled back: %s", ended.progress.error)
            self._changes.fail()
        else:
            self._changes.reset()
            interval_s = self._crew.settings.coordinator.min_reconfigure_interval_s
            self._changes.not_before = self._crew.clock() + interval_s

    async def _disband(self) -> None:
        """Nothing to decode, and the policy keeps nobody."""
        roster = self._crew.roster
        workers = roster.member_workers()
        self._keep_group = False
        roster.disband()
        await end(self._acquiring)
        self._acquiring = None
        await all_of(self._crew.leave(worker) for worker in workers)
        await self._crew.kill(roster.workers.values())
        await self._crew.store.forget_generation(roster.generation)
        await self._crew.store.record(roster.record())

    def _wake_in(self, seconds: float) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        if seconds > 0:
            self._alarm = asyncio.get_running_loop().call_later(seconds, self.wake)
