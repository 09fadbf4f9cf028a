"""Workers with their leases: getting them and ending them.

The order is always the same: a lease is granted, a process starts in it, the engine is built;
and back: the process has gone, then the lease is removed (never before). The ledger books a
slot from its grant to its removal.
"""

import asyncio
from collections.abc import Callable, Iterable

from actors.accounting import LeaseLedger, SlotUse
from actors.capacity import Capacity, measure_capacity
from actors.concurrently import all_of, each_of
from actors.ports import GroupStore, Lease, LeasePort, WorkerFactory
from actors.protocol import ModelFacts, WorkerSpec
from actors.roster import Roster, Worker
from actors.settings import RuntimeSettings
from actors.telemetry import Telemetry
from placement.errors import FlexFloorError, WorkerLostError
from placement.ids import Generation, WorkerId

_ACQUIRE_SLICE_S = 5.0
"""One request for leases: what arrives in this time is put to work before the rest is here."""


class Crew:
    def __init__(
        self,
        settings: RuntimeSettings,
        leases: LeasePort,
        factory: WorkerFactory,
        store: GroupStore,
        roster: Roster,
        ledger: LeaseLedger,
        telemetry: Telemetry,
        clock: Callable[[], float],
    ) -> None:
        self.settings = settings
        self.store = store
        self.roster = roster
        self.ledger = ledger
        self.telemetry = telemetry
        self.clock = clock
        self._leases = leases
        self._factory = factory
        self.slot_use = SlotUse()
        self._capacity: Capacity | None = None
        self.membership = asyncio.Lock()
        """Held by whoever changes who the members are, or works on all of them as they are."""

    @property
    def capacity(self) -> Capacity:
        """Known once a first worker has been built."""
        assert self._capacity is not None, "no worker has been built yet"
        return self._capacity

    @property
    def least_width(self) -> int:
        """As far as it is known: the floor needs a worker's measurements."""
        min_workers = self.settings.group.min_workers
        return max(min_workers, self._capacity.floor if self._capacity else 1)

    def learn(self, facts: ModelFacts) -> None:
        """Raises: ConfigError."""
        self._capacity = measure_capacity(facts, self.settings.group)
        self.roster.facts = facts

    async def acquire(
        self,
        count: int,
        enough: int,
        say: Callable[[str], None],
        still_wanted: Callable[[], bool] = lambda: True,
    ) -> list[Worker]:
        """Between ``enough`` and ``count`` leases, each with a worker id, or none of them.

        Waits ``lease.acquire_timeout_s`` at most, and not longer than one slice if ``enough``
        are there.
        """
        started_at = self.clock()
        deadline = started_at + self.settings.lease.acquire_timeout_s
        workers: list[Worker] = []
        while len(workers) < enough and still_wanted():
            remaining_s = deadline - self.clock()
            if remaining_s <= 0:
                break
            try:
                granted = await self._leases.acquire(
                    count - len(workers), min(_ACQUIRE_SLICE_S, remaining_s), say
                )
            except FlexFloorError:
                await self.kill(workers)
                raise
            workers += [self.enlist(lease) for lease in granted]
        self.telemetry.lease_wait_s.observe(self.clock() - started_at)
        if len(workers) >= enough:
            return workers
        self.telemetry.lease_timeouts.inc()
        await self.kill(workers)
        return []

    def enlist(self, lease: Lease, worker_id: WorkerId | None = None) -> Worker:
        """A new worker (or, with its id, one that is taken over) in a granted lease."""
        if worker_id is None:
            worker_id = self.roster.new_worker_id()
        worker = self.roster.workers[worker_id] = Worker(worker_id, lease)
        self.ledger.lease(1, lease.granted_at)
        self.slot_use.leased(lease.node_id)
        return worker

    async def build(
        self,
        workers: list[Worker],
        members: tuple[WorkerId, ...],
        generation: Generation,
        joiner: bool,
    ) -> None:
        """Start the processes and build their engines, all at once.

        Raises:
            ModelRefusedError, ConfigError: the engine cannot serve this.
            WorkerLostError: a process ended, or was not built within group.build_timeout_s.
        """
        address = await self.store.address()
        await all_of(
            self._build_one(worker, self._spec(worker, members, generation, joiner, address))
            for worker in workers
        )

    async def _build_one(self, worker: Worker, spec: WorkerSpec) -> None:
        timeout_s = self.settings.group.build_timeout_s
        worker.spawning = asyncio.ensure_future(self._factory.spawn(worker.worker_id, worker.lease))
        try:
            async with asyncio.timeout(timeout_s):
                # A start that is given up half-way is still awaited before the worker is ended.
                worker.port = await asyncio.shield(worker.spawning)
                worker.built(await worker.port.build(spec))
        except TimeoutError:
            raise WorkerLostError(
                f"worker {worker.worker_id} was not built within {timeout_s} s; raise "
                "group.build_timeout_s if the model needs longer"
            ) from None

    def _spec(
        self,
        worker: Worker,
        members: tuple[WorkerId, ...],
        generation: Generation,
        joiner: bool,
        address: tuple[str, int],
    ) -> WorkerSpec:
        model, group = self.settings.model, self.settings.group
        return WorkerSpec(
            worker_id=worker.worker_id,
            members=members,
            generation=generation,
            joiner=joiner,
            store_address=address,
            model=model.path,
            engine_args={
                "max_model_len": model.max_model_len,
                "dtype": model.dtype,
                **model.engine,
            },
            kv_memory_bytes=group.kv_memory_bytes,
            max_workers=group.max_workers,
            exact=model.exact,
            max_samples=group.max_samples_per_worker,
            idle_beat_s=group.idle_beat_s,
            collective_timeout_s=group.collective_timeout_s,
        )

    async def others_now(self) -> dict[str, float]:
        """Slots that others hold, per node."""
        return await self._leases.slots_of_others()

    async def leave(self, worker: Worker) -> None:
        """End a worker in good order, or by force if that takes too long or it is lost."""
        worker.leaving = True
        try:
            async with asyncio.timeout(self.settings.group.leave_timeout_s):
                await worker.live.leave()
        except (TimeoutError, WorkerLostError):
            await self._end_process(worker)
        await self._remove(worker)

    async def kill(self, workers: Iterable[Worker]) -> None:
        """End workers by force and remove their leases; every one, whatever state it is in.

        Raises: what the first lease that could not be removed raised, after all were tried.
        """
        for outcome in await each_of(self._kill_one(worker) for worker in list(workers)):
            if isinstance(outcome, FlexFloorError):
                raise outcome

    async def _kill_one(self, worker: Worker) -> None:
        worker.leaving = True
        await self._end_process(worker)
        await self._remove(worker)

    async def _end_process(self, worker: Worker) -> None:
        if worker.spawning is not None and worker.port is None:
            try:
                worker.port = await worker.spawning
            except FlexFloorError:
                return  # it never came to life
        if worker.port is not None:
            try:
                await worker.port.kill()
            except WorkerLostError:
                return  # it has gone before us

    async def _remove(self, worker: Worker) -> float:
        """Remove the lease of a worker whose process has gone; returns the wall clock of it."""
        if worker.collecting is not None:
            worker.collecting.cancel()
        removed_at = await self._leases.release(worker.lease)
        self.ledger.lease(-1, removed_at)
        worker.removed_at = removed_at
        self.roster.remove(worker.worker_id)
        self.telemetry.gone(worker.worker_id)
        return removed_at

    async def existing_leases(self) -> list[Lease]:
        return await self._leases.existing()

    async def sweep(self) -> None:
        """Remove leases of ours that no worker on the roster has."""
        held = {worker.lease.name for worker in self.roster.workers.values()}
        for lease in await self._leases.existing():
            if lease.name not in held:
                await self._leases.release(lease)
