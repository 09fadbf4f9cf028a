"""The coordinator: what its callers ask, answered from the records; what it decides is done by
``actors.steering``.

It runs in one event loop and needs no Ray: workers, leases and memory are ports.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

from actors.accounting import LeaseLedger
from actors.admission import make_samples
from actors.backlog import Backlog
from actors.cancelling import Cancelling
from actors.concurrently import end
from actors.control_api import (
    STANDS_STILL,
    PauseMode,
    PauseStatus,
    ServingState,
    WeightsGroup,
    WeightStatus,
    WeightUpdate,
)
from actors.crew import Crew
from actors.deadlines import Deadlines
from actors.foresight import Foresight
from actors.journal import Journal, MemoryJournal
from actors.pausing import Pausing
from actors.ports import GroupStore, LeasePort, WorkerFactory
from actors.regularly import regularly
from actors.rollout import Rollout
from actors.rollout_api import (
    CancelledBy,
    FinishedBatch,
    Health,
    OperationStatus,
    RolloutRequest,
    RolloutStatus,
    SampleNews,
    ServedModel,
    TokenBatch,
    TokenWish,
    WorkerStatus,
)
from actors.roster import Roster
from actors.served_weights import ServedWeights
from actors.settings import RuntimeSettings
from actors.steering import Steering
from actors.telemetry import Telemetry
from actors.weight_exchange import WeightExchange
from actors.weights import WeightUpdates
from actors.weights_keeper import WeightsKeeper
from placement.dispatch import plan_dispatch
from placement.errors import FlexFloorError, RequestError, UnavailableError
from placement.ids import RolloutId, SampleId
from placement.release import ReleaseRule, decide_width
from placement.samples import FinishReason
from placement.views import DispatchPlan, GroupView


class Coordinator:
    """Implements ``actors.rollout_api.CoordinatorPort``.

    Args:
        clock: wall clock, in seconds since the epoch.
        journal: where accepted work is remembered; one that outlives the process makes
            rollouts survive it.
        dispatch, release_rule: the decisions; None: what ``settings.planning`` says.

    Raises:
        ConfigError: there is a length history that cannot be used.
    """

    def __init__(
        self,
        settings: RuntimeSettings,
        leases: LeasePort,
        factory: WorkerFactory,
        store: GroupStore,
        clock: Callable[[], float] = time.time,
        *,
        keeper: WeightsKeeper,
        journal: Journal | None = None,
        dispatch: Callable[[GroupView], DispatchPlan] | None = None,
        release_rule: ReleaseRule | None = None,
    ) -> None:
        self._settings = settings
        self._factory = factory
        self._clock = clock
        self._ledger = LeaseLedger(clock())
        self._journal = journal if journal is not None else MemoryJournal()
        self._telemetry = Telemetry(
            lambda: self._ledger.totals(self._clock()), self._journal.figures
        )
        self._crew = Crew(
            settings, leases, factory, store, Roster(), self._ledger, self._telemetry, clock
        )
        self._backlog = Backlog(
            settings.coordinator, self._journal, self._ledger, self._telemetry, clock
        )
        plans = settings.planning.policy == "planner"
        self._foresight = Foresight(settings, clock) if plans else None
        self._steering = Steering(
            self._crew,
            self._backlog,
            dispatch or (self._foresight.dispatch if self._foresight else plan_dispatch),
            release_rule or (self._foresight.decide_width if self._foresight else decide_width),
            self._foresight,
            served_weights := ServedWeights(self._crew, keeper),
            self._end_for_pause,
        )
        steering = self._steering
        exchange = WeightExchange(self._crew, keeper, steering.holding, steering.lose_group)
        self._weights = WeightUpdates(
            self._crew, served_weights, keeper, exchange, steering.standstill
        )
        self._cancelling = Cancelling(self._crew, self._backlog)
        self._deadlines = Deadlines(clock, self._expire)
        self._served: ServedModel | None = None
        self._starting: asyncio.Task[None] | None = None
        self._background: list[asyncio.Task[None]] = []
        self._closing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Take over what an earlier coordinator left, or found a group; returns when it decodes.

        Raises:
            LeaseTimeoutError: capacity did not arrive within its bound.
            ModelRefusedError, ConfigError: the engine cannot serve this.
            WorkerLostError: a worker ended while it was built.
        """
        self._background.append(
            asyncio.ensure_future(
                regularly(
                    self._settings.coordinator.reaper_timeout_s / 3,
                    "the store did not hear the coordinator's heartbeat",
                    self._beat,
                )
            )
        )
        self._starting = asyncio.ensure_future(self._start())
        try:
            await asyncio.shield(self._starting)
        except asyncio.CancelledError:
            if self._closing is None:
                await end(self._starting)
                raise
            raise UnavailableError("the service was shut down while it started") from None
        except BaseException:
            await end(*self._background)
            raise

    async def _beat(self) -> None:
        """Also the watch over the store: a group whose store has gone can never change again."""
        try:
            await self._crew.store.heartbeat()
        except UnavailableError as error:
            if not await self._crew.store.renew():
                raise
            self._steering.lose_group(f"the store of the group has gone: {error}")

    async def _start(self) -> None:
        self._backlog.replay(lambda request: make_samples(request, self._unchecked_model()))
        if self._foresight is not None:
            self._foresight.take_over(self._backlog.open_rollouts())
            self._backlog.when_accepted.append(self._foresight.accepted)
            self._backlog.when_sample_ends.append(self._foresight.ended)
            self._backlog.when_load_ends.append(self._foresight.load_ended)
        self._backlog.when_accepted.append(self._deadlines.watch)
        self._backlog.when_rollout_ends.append(self._deadlines.ended)
        await self._steering.start(self._factory)
        for rollout in self._backlog.open_rollouts():
            self._deadlines.watch(rollout)
        await self._end_aborted()
        facts = self._crew.capacity.facts
        self._served = ServedModel(
            path=self._settings.model.path,
            vocab_size=facts.vocab_size,
            max_model_len=facts.max_model_len,
            exact=self._settings.model.exact,
            eos_token_ids=facts.eos_token_ids,
            routing=facts.routing,
        )
        self._background.append(
            asyncio.ensure_future(
                regularly(
                    self._settings.lease.usage_poll_s,
                    "nobody can say who holds the freed slots",
                    self._watch_freed_slots,
                )
            )
        )

    async def _end_aborted(self) -> None:
        """Rollouts whose abort an earlier coordinator did not finish."""
        for rollout in self._backlog.open_rollouts():
            if why := rollout.abortion:
                await self._cancelling.cancel(rollout, rollout.unfinished(), why.by, why.error)

    def _unchecked_model(self) -> ServedModel:
        """For requests that were accepted before: whatever they hold is served."""
        return ServedModel(self._settings.model.path, 1 << 62, 1 << 62, False, ())

    async def _watch_freed_slots(self) -> None:
        used = 0.0
        if self._ledger.freed and self._crew.slot_use.watching:
            used = self._crew.slot_use.used(await self._crew.others_now())
        self._ledger.set_used(used, self._clock())

    async def served_model(self) -> ServedModel:
        """Raises: UnavailableError."""
        if self._closing is not None:
            raise UnavailableError("the service is shutting down")
        if self._served is None:
            raise UnavailableError(
                f"the service is starting: {self._steering.waiting_for or 'nothing leased yet'}"
            )
        return replace(self._served, weight_version=self._weights.version)

    async def submit(self, request: RolloutRequest) -> RolloutStatus:
        model = await self.served_model()
        rollout = self._backlog.find(request)
        if rollout is None:
            if self._steering.broken:
                raise UnavailableError(f"{self._steering.broken}; restart the service")
            rollout = self._backlog.accept(request, make_samples(request, model))
            self._steering.accepted()
        status = self._status(rollout)
        await self._backlog.written()
        return status

    async def status(self, rollout_id: RolloutId) -> RolloutStatus:
        status = self._status(self._backlog.rollout(rollout_id))
        await self._backlog.written()
        return status

    def _status(self, rollout: Rollout) -> RolloutStatus:
        usage = self._ledger.usage(rollout.rollout_id, self._clock())
        pause = self._steering.pausing.status()
        if pause.state is not ServingState.SERVING:
            return rollout.status(f"the group is {pause.state}", usage)
        waits = any(record.worker_id is None for record in rollout.unfinished())
        return rollout.status(self._steering.waiting_for if waits else "", usage)

    async def results(
        self, rollout_id: RolloutId, cursor: int, wait_s: float, limit: int
    ) -> FinishedBatch:
        rollout = self._backlog.rollout(rollout_id)
        _check_limit(limit)
        rollout.check_cursor(cursor)
        await rollout.wait_for_ending(cursor, wait_s)
        batch = rollout.batch(cursor, limit)
        await self._backlog.written()
        return batch

    async def tokens(
        self, rollout_id: RolloutId, known: tuple[int | None, ...], wait_s: float
    ) -> tuple[SampleNews, ...]:
        news = await self._backlog.rollout(rollout_id).news(known, wait_s)
        await self._backlog.written()
        return news

    async def tokens_of(
        self, wishes: tuple[TokenWish, ...], wait_s: float
    ) -> tuple[tuple[SampleNews, ...] | FlexFloorError | None, ...]:
        news = await self._backlog.tokens.first_news(wishes, wait_s)
        await self._backlog.written()
        return news

    async def new_tokens(
        self, rollout_id: RolloutId, cursor: int, wait_s: float, limit: int
    ) -> TokenBatch:
        rollout = self._backlog.rollout(rollout_id)
        _check_limit(limit)
        rollout.check_cursor(cursor, of_tokens=True)
        batch = await rollout.new_tokens(cursor, wait_s, limit)
        await self._backlog.written()
        return batch

    async def open_rollouts(self) -> list[RolloutStatus]:
        return [self._status(rollout) for rollout in self._backlog.open_rollouts()]

    async def abort(
        self, rollout_id: RolloutId, sample_ids: tuple[SampleId, ...] | None = None
    ) -> FinishedBatch:
        rollout = self._backlog.rollout(rollout_id)
        cursor = rollout.num_ended
        if sample_ids is None:
            self._backlog.abort(rollout, CancelledBy.CALLER)
        ending = [
            record
            for record in rollout.unfinished()
            if sample_ids is None or record.sample.sample_id in sample_ids
        ]
        await self._cancelling.cancel(rollout, ending, CancelledBy.CALLER)
        self._steering.wake()
        batch = rollout.batch(cursor, len(rollout.records))
        await self._backlog.written()
        return batch

    async def _expire(self, rollout: Rollout) -> None:
        text = f"deadline_s = {rollout.request.deadline_s:g} s were over"
        self._backlog.abort(rollout, CancelledBy.DEADLINE, text)
        await self._cancelling.cancel(rollout, rollout.unfinished(), CancelledBy.DEADLINE, text)
        self._steering.wake()

    async def _end_for_pause(self, rollout_id: RolloutId) -> None:
        rollout = self._backlog.rollout(rollout_id)
        text = "the service was paused, and what was unfinished is aborted"
        self._backlog.abort(rollout, CancelledBy.SERVICE, text)
        await self._cancelling.cancel(rollout, rollout.unfinished(), CancelledBy.SERVICE, text)

    async def pause(self, mode: PauseMode, wait_s: float = 0.0) -> PauseStatus:
        (await self._pausing()).pause(mode)
        return await self.pause_status(wait_s)

    async def resume(self) -> PauseStatus:
        (await self._pausing()).resume()
        return await self.pause_status()

    async def sleep(self, mode: PauseMode = PauseMode.ABORT, wait_s: float = 0.0) -> PauseStatus:
        (await self._pausing()).sleep(mode)
        return await self.pause_status(wait_s)

    async def wake(self, wait_s: float = 0.0, *, stay_paused: bool = False) -> PauseStatus:
        if (await self._pausing()).wake(stay_paused=stay_paused):
            self._steering.sleeps_no_more()
        return await self.pause_status(wait_s)

    async def pause_status(self, wait_s: float = 0.0) -> PauseStatus:
        pausing = await self._pausing()
        await pausing.until_settled(wait_s)
        status = pausing.status()
        if status.on_its_way and self._steering.waiting_for:
            return replace(status, waiting_for=self._steering.waiting_for)
        return status

    async def reset_prefix_cache(self, *, running: bool = False) -> bool:
        pausing = await self._pausing()
        if running:
            await pausing.cancel_running()
        return running or not self._backlog.running()

    async def _pausing(self) -> Pausing:
        """Raises: UnavailableError."""
        await self.served_model()
        if self._steering.broken:
            raise UnavailableError(f"{self._steering.broken}; restart the service")
        return self._steering.pausing

    async def update_weights(self, update: WeightUpdate) -> WeightStatus:
        await self._pausing()  # what serves can be updated, asleep or not
        return await self._weights.update(update)

    async def weight_status(self) -> WeightStatus:
        return await self._weights.status()

    async def init_weights_group(self, group: WeightsGroup) -> None:
        await self._weights.join_group(group)

    async def destroy_weights_group(self, name: str) -> None:
        await self._weights.leave_group(name)

    async def workers(self) -> list[WorkerStatus]:
        roster = self._crew.roster
        return [
            roster.status_of(worker, len(self._backlog.running_on(worker.worker_id)))
            for worker in roster.workers.values()
        ]

    async def operations(self) -> list[OperationStatus]:
        return [operation.status() for operation in self._steering.width.operations]

    async def health(self) -> Health:
        now = self._clock()
        open_rollouts = self._backlog.open_rollouts()
        bound_s = self._settings.group.collective_timeout_s
        last_step_at = self._steering.listening.last_step_at
        age_s = now - last_step_at if last_step_at else 0.0
        healthy, detail = True, "nothing to decode"
        pause = self._steering.pausing.status()
        if self._steering.broken:
            healthy, detail = False, self._steering.broken
        elif trouble := self._journal.figures().trouble:
            healthy, detail = False, trouble
        elif self._weights.standing_still_for:
            detail = self._weights.standing_still_for
        elif pause.state in STANDS_STILL:
            detail = f"{pause.state}; {self._backlog.num_open} samples wait"
        elif open_rollouts:
            since = max(
                last_step_at, self._steering.pausing.served_since, self._weights.served_since
            )
            waited_s = min(now - max(since, r.accepted_at) for r in open_rollouts)
            healthy = waited_s <= bound_s
            detail = (
                f"{self._backlog.num_open} samples are open, the last step or acceptance is "
                f"{waited_s:.1f} s ago (bound {bound_s} s)"
            )
            if self._steering.waiting_for:
                detail += f"; waiting for {self._steering.waiting_for}"
        return Health(
            healthy=healthy,
            detail=detail,
            last_step_age_s=age_s,
            workers=len(self._crew.roster.members),
            wanted_workers=self._steering.width.wanted_workers,
        )

    async def metrics_text(self) -> bytes:
        roster = self._crew.roster
        busy = {record.worker_id for record in self._backlog.running()}
        self._telemetry.open_samples.set(self._backlog.num_open)
        self._telemetry.queued.set(self._backlog.num_queued)
        self._telemetry.old_weight_samples.set(
            sum(
                record.weight_spans.began_before(self._weights.version)
                for rollout in self._backlog.open_rollouts()
                for record in rollout.unfinished()
            )
        )
        return self._telemetry.text(
            [str(roster.state_of(w, w.worker_id in busy)) for w in roster.workers.values()]
        )

    async def shutdown(self) -> None:
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        await end(self._starting, *self._background)
        await self._deadlines.stop()
        await self._weights.stop()
        await self._steering.stop()
        self._backlog.end_all_open(
            FinishReason.ABORT, "the service was shut down", CancelledBy.SERVICE
        )
        if self._foresight is not None:
            self._foresight.save()
        await self._crew.kill(self._crew.roster.workers.values())
        self._crew.roster.disband()
        await self._crew.sweep()
        await self._crew.store.record(self._crew.roster.record())
        await self._journal.close()


def _check_limit(limit: int) -> None:
    """Raises: RequestError."""
    if limit < 1:
        raise RequestError(f"is {limit}; it must be at least 1", field="limit")
