"""The coordinator's decisions carried out: who decodes what, how wide the group is, and what
happens when it is lost.

One loop, woken by what happens, takes one turn at a time: begin afresh if the group is lost,
bind queued samples, then see to the group's width.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from actors.attempts import Attempts
from actors.backlog import Backlog
from actors.concurrently import all_of, each_of, end
from actors.crew import Crew
from actors.foresight import Foresight
from actors.founding import attach_group, found_group
from actors.holding import Holding
from actors.kv_moves import KvMoves
from actors.listening import Listening
from actors.outlook import view_for_dispatch
from actors.pausing import Pausing
from actors.ports import WorkerFactory
from actors.rebalancing import Rebalancing
from actors.reconfigure import Reconfiguration
from actors.rollout_api import Strategy
from actors.served_weights import ServedWeights
from actors.standstill import Standstill
from actors.width import Width
from placement.dispatch import assign_static_chunks, plan_static_chunks
from placement.errors import ConfigError, FlexFloorError, ModelRefusedError, WorkerLostError
from placement.ids import RolloutId, SampleId, WorkerId
from placement.release import IdlePolicy, ReleaseRule
from placement.samples import FinishReason
from placement.views import DispatchPlan, GroupView

_log = logging.getLogger(__name__)

_HEARTBEAT_S = 1.0  # decisions follow events; this only bounds what a missed one costs
_MAX_RESTARTS = 3
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0


def _rebalancing(crew: Crew, backlog: Backlog, kv_moves: KvMoves) -> Rebalancing | None:
    planning = crew.settings.planning
    if not planning.rebalance:
        return None
    return Rebalancing(crew, backlog, kv_moves, planning.rebalance_steps)


class Steering:
    """Args:
    foresight: what the rules are to know beside the records; None: they know no lengths.
    weights: that a group which is founded begins with.
    abort: end the unfinished samples of a rollout, with their partials.
    """

    def __init__(
        self,
        crew: Crew,
        backlog: Backlog,
        dispatch: Callable[[GroupView], DispatchPlan],
        release_rule: ReleaseRule,
        foresight: Foresight | None,
        weights: ServedWeights,
        abort: Callable[[RolloutId], Coroutine[Any, Any, Any]],
    ) -> None:
        self._crew = crew
        self._backlog = backlog
        self._dispatch_rule = dispatch
        self._foresight = foresight
        self._weights = weights
        self._moves = KvMoves(crew)
        self._rebalancing = _rebalancing(crew, backlog, self._moves)
        self.listening = Listening(crew, backlog, self._moves, self, foresight, self._rebalancing)
        self.waiting_for = ""
        self.width = Width(
            crew,
            backlog,
            self._moves,
            release_rule,
            foresight,
            self.listening.listen,
            self.wake,
            self._say,
        )
        backlog.when_load_ends.append(self.width.load_ended)
        self.holding = Holding(crew)
        self._wakeup = asyncio.Event()
        self.standstill = Standstill(self.wake, crew.membership)
        self.pausing = Pausing(crew, backlog, self.holding, abort, self.wake)
        self._loop: asyncio.Task[None] | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._lost = ""
        self._keep_group = True
        self._seen_endings = 0
        self._asked = False
        """A rollout was accepted since the start: before that the idle policy has no say."""
        self._restarts = Attempts(_MAX_RESTARTS, _FIRST_PAUSE_S, _LONGEST_PAUSE_S, crew.clock)

    @property
    def change(self) -> Reconfiguration | None:
        """The change in progress."""
        return self.width.change

    async def start(self, factory: WorkerFactory) -> None:
        """Take a group over or found one, then begin to decide.

        Raises: as ``found_group``.
        """
        if await attach_group(self._crew, self._weights, factory):
            workers = self._crew.roster.member_workers()
            await all_of(self.listening.catch_up(worker) for worker in workers)
        else:
            self._backlog.take_back_strays(())  # new workers may have the ids of old ones
            if not self._crew.roster.asleep:
                await self._found()
        self.pausing.take_over()
        self._backlog.take_back_strays(self._crew.roster.members)
        for worker in self._crew.roster.member_workers():
            self.listening.listen(worker)
        self._loop = asyncio.ensure_future(self._run())
        self._loop.add_done_callback(self._loop_ended)
        self.wake()

    async def stop(self) -> None:
        """Decide nothing more; whatever was under way is broken off."""
        self._wake_in(0)
        await end(self._loop)
        await self.width.break_off("the service was shut down")

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
        self._asked = True
        self._keep_group = self._keep_group or not self.pausing.stands
        self._restarts.reset()
        self.width.renew()
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
            try:
                await self._turn()
            except FlexFloorError as error:
                self.lose_group(f"the coordinator could not go on: {error}")

    async def _turn(self) -> None:
        if reason := self.width.reap():
            self.lose_group(reason)
        if self.listening.endings > self._seen_endings:
            self._seen_endings = self.listening.endings
            self._restarts.reset()
        if self._lost:
            await self._give_group_up()
        await self.pausing.end_unfinished()
        if not self._crew.roster.members and self._wants_group:
            await self._found_again()
        if not self._lost:
            await self.standstill.run()
        if self._lost:
            return
        if self.pausing.stands:
            await self._rest()
        else:
            await self.pausing.go()
            await self._decide()

    async def _decide(self) -> None:
        if self._crew.roster.members:
            self._look_ahead()
            await self._dispatch()
            policy = self._crew.settings.group.idle_workers if self._asked else IdlePolicy.ALL
            if not await self.width.steer(IdlePolicy(policy)):
                await self._disband()
            self._wake_in(self.width.pause_s)

    # Pause and sleep

    def sleeps_no_more(self) -> None:
        """A group that was asleep is to be founded, and nobody leaves it before it has work."""
        self._keep_group = True
        self._asked = bool(self._backlog.num_open)
        self._restarts.reset()

    @property
    def _wants_group(self) -> bool:
        pausing = self.pausing
        if pausing.sleeps:
            return pausing.drains
        return self._keep_group or not pausing.stands

    async def _rest(self) -> None:
        """Go on towards the pause or the sleep that is wanted; nothing else is decided."""
        pausing = self.pausing
        if self.width.change is not None:
            await self._dispatch()  # leavers wait until their samples are elsewhere
            return
        await self.width.forgo_growth()
        if pausing.drains:
            await pausing.drain()
            await self._dispatch()
        elif not pausing.sleeps:
            await pausing.stand_still()
        elif not pausing.reached and await pausing.take_samples_back():
            await self._disband()
            self._backlog.unpin_static()
            await pausing.fall_asleep()

    # The group as a whole

    async def _found(self) -> None:
        await found_group(self._crew, self._weights, self._say)
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
                if self.pausing.waking:
                    self.pausing.fail_to_wake(str(error))
                else:
                    self._fail_open(str(error))
            self._wake_in(self._restarts.pause_s)
            return
        await self.holding.hold_members()
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
        self._restarts.fail()
        if self._restarts.exhausted:
            self._fail_open(reason)
        await self.width.break_off(reason)
        workers = list(roster.workers.values())
        for worker in workers:
            self._backlog.take_back(worker.worker_id)
        if self._rebalancing is not None:
            self._rebalancing.give_up()
        roster.disband()
        self._backlog.unpin_static()
        await self._crew.kill(workers)
        self._crew.telemetry.restarts.inc()
        self._lost = ""
        if self.pausing.stands:  # another store would not know of it before a group is founded
            await self._crew.store.record(roster.record())

    async def _disband(self) -> None:
        """Nothing to decode, and the policy keeps nobody."""
        roster = self._crew.roster
        workers = roster.member_workers()
        others = await self._crew.others_now()
        self._keep_group = False
        roster.disband()
        await self.width.break_off("nobody is to stay")
        await all_of(self._crew.leave(worker) for worker in workers)
        for worker in workers:
            self._crew.slot_use.released(worker.lease.node_id, others)
        await self._crew.kill(roster.workers.values())
        await self._crew.store.forget_generation(roster.generation)
        await self._crew.store.record(roster.record())

    def _wake_in(self, seconds: float) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        if seconds > 0:
            self._alarm = asyncio.get_running_loop().call_later(seconds, self.wake)

    def _look_ahead(self) -> None:
        if self._foresight is None or not self._backlog.num_open:
            return
        copy_speed = self._moves.copy_speed()
        self._foresight.price_with(
            self._crew.capacity.facts,
            self._moves.prefill_s_per_token(),
            1 / copy_speed.s_per_byte if copy_speed and copy_speed.s_per_byte else None,
        )
        self._foresight.renew(
            self._backlog.running, self._backlog.load_steps, self._backlog.load_ended
        )

    # Samples to workers

    async def _dispatch(self) -> None:
        leaving, kept = self.width.leaving(), self._moves.kept()
        if self._backlog.num_queued and len(leaving) < len(self._crew.roster.members):
            bound = self._bind(self._arrivals(leaving))
            if self._backlog.num_queued:
                for worker_id, ids in self._bind(self._plan_dispatch(leaving)).items():
                    bound.setdefault(worker_id, []).extend(ids)
            self._pin_static()
            if chunk_worker := self._backlog.chunk_worker():
                view = view_for_dispatch(self._crew, self._backlog, None, Strategy.STATIC, leaving)
                for worker_id, ids in self._bind(plan_static_chunks(view, chunk_worker)).items():
                    bound.setdefault(worker_id, []).extend(ids)
            if bound:  # else a restart would not know who decodes them
                await self._backlog.until_written()
            await each_of(self._submit(worker_id, ids) for worker_id, ids in bound.items())
        self._moves.give_up(kept)  # no slot is held for what found no room
        if not self._backlog.num_queued and not self.width.growing:
            self.waiting_for = ""
        await self._even_out()

    def _plan_dispatch(self, leaving: frozenset[WorkerId]) -> DispatchPlan:
        return self._dispatch_rule(
            view_for_dispatch(self._crew, self._backlog, self._foresight, Strategy.ELASTIC, leaving)
        )

    def _arrivals(self, leaving: frozenset[WorkerId]) -> DispatchPlan:
        if self._rebalancing is None:
            return DispatchPlan(())
        changing = self.width.change is not None
        return DispatchPlan(tuple(self._rebalancing.arrivals(leaving, changing)))

    async def _even_out(self) -> None:
        """Begin the moves that the dispatch rule wants of running samples, while nobody waits and
        the group does not change. A static rollout stays as it was cut."""
        rebalancing, backlog = self._rebalancing, self._backlog
        if rebalancing is None or backlog.num_queued or self.width.change is not None:
            return
        if any(r.request.strategy is Strategy.STATIC for r in backlog.open_rollouts()):
            return
        if rebalancing.due and backlog.num_open:
            plan = self._plan_dispatch(frozenset())
            await rebalancing.begin(plan.moves, self.listening.lose_worker)

    def _bind(self, plan: DispatchPlan) -> dict[WorkerId, list[SampleId]]:
        bound: dict[WorkerId, list[SampleId]] = {}
        for binding in plan.bindings:
            self._backlog.bind(self._backlog.record(binding.sample_id), binding.worker_id)
            bound.setdefault(binding.worker_id, []).append(binding.sample_id)
        return bound

    async def _submit(self, worker_id: WorkerId, sample_ids: list[SampleId]) -> None:
        worker = self._crew.roster.workers[worker_id]
        samples = [
            record.to_submit()
            for record in map(self._backlog.record, sample_ids)
            if not self._backlog.take_back_ended(record)
        ]
        if not samples:
            return
        try:
            await self._moves.submit(worker, samples)
        except WorkerLostError as error:
            self.listening.lose_worker(worker, str(error))

    def _pin_static(self) -> None:
        """Chunks are cut once the group is as wide as it will get."""
        if self.width.as_wide_as_it_gets:
            members = self._crew.roster.members
            for rollout in self._backlog.open_rollouts():
                if rollout.request.strategy is Strategy.STATIC and rollout.chunk_worker is None:
                    rollout.chunk_worker = assign_static_chunks(list(rollout.records), members)
