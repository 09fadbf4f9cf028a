"""A coordinator that leases and builds for real, and decodes nothing."""

import asyncio
import time
from collections.abc import Callable

from actors.journal import Journal
from actors.ports import GroupStore, Lease, LeasePort, WorkerFactory, WorkerPort
from actors.rollout_api import (
    FinishedBatch,
    Health,
    OperationStatus,
    RolloutRequest,
    RolloutStatus,
    ServedModel,
    WorkerStatus,
)
from actors.settings import RuntimeSettings
from actors.weights_keeper import WeightsKeeper
from placement.errors import LeaseTimeoutError, RequestError, UnavailableError, UnknownIdError
from placement.ids import RolloutId, SampleId, WorkerId
from tests.cluster.fake_member import make_spec


class FakeCoordinator:
    """Starts one fake worker per lease, and finds them again when it is restarted."""

    def __init__(
        self,
        settings: RuntimeSettings,
        leases: LeasePort,
        factory: WorkerFactory,
        store: GroupStore,
        clock: Callable[[], float] = time.time,
        *,
        keeper: WeightsKeeper,
        journal: Journal,
    ) -> None:
        self._settings = settings
        self._leases = leases
        self._factory = factory
        self._store = store
        self._held: list[Lease] = []
        self._workers: list[WorkerPort] = []
        self._waiting_for = "starting"
        self._beats: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._beats = asyncio.create_task(self._beat())
        wanted = self._settings.group.max_workers
        self._held = await self._leases.existing()
        found = [await self._factory.attach(WorkerId(n)) for n in range(len(self._held))]
        self._workers = [worker for worker in found if worker is not None]
        if not self._workers:
            bound_s = self._settings.lease.acquire_timeout_s
            self._held = await self._leases.acquire(wanted, bound_s, self._say)
            if len(self._held) < wanted:
                await self.shutdown()
                raise LeaseTimeoutError(
                    f"{wanted} leases did not arrive: {self._waiting_for}",
                    field="group.max_workers",
                )
            for number, lease in enumerate(self._held):
                worker = await self._factory.spawn(WorkerId(number), lease)
                self._workers.append(worker)
                await worker.build(make_spec(number, self._settings.model.path))
        self._waiting_for = ""

    def _say(self, text: str) -> None:
        self._waiting_for = text

    async def _beat(self) -> None:
        while True:
            await self._store.heartbeat()
            await asyncio.sleep(self._settings.coordinator.reaper_timeout_s / 3)

    async def served_model(self) -> ServedModel:
        if self._waiting_for:
            raise UnavailableError(f"the service is starting: {self._waiting_for}")
        return ServedModel(self._settings.model.path, 512, 128, True, (0,))

    async def submit(self, request: RolloutRequest) -> RolloutStatus:
        raise RequestError("prompt 0 is empty; send at least one token", field="prompts[0]")

    async def status(self, rollout_id: RolloutId) -> RolloutStatus:
        raise UnknownIdError(f"no rollout {rollout_id!r}")

    async def results(
        self, rollout_id: RolloutId, cursor: int, wait_s: float, limit: int
    ) -> FinishedBatch:
        await asyncio.sleep(wait_s)
        return FinishedBatch((), cursor, True)

    async def abort(
        self, rollout_id: RolloutId, sample_ids: tuple[SampleId, ...] | None = None
    ) -> FinishedBatch:
        return FinishedBatch((), 0, True)

    async def workers(self) -> list[WorkerStatus]:
        return [
            WorkerStatus(w.worker_id, "idle", 0, (), lease.node_id, "", 0, 0, 0, 0, 0.0, 0)
            for w, lease in zip(self._workers, self._held, strict=True)
        ]

    async def operations(self) -> list[OperationStatus]:
        return []

    async def health(self) -> Health:
        wanted = self._settings.group.max_workers
        return Health(True, self._waiting_for, 0.0, len(self._workers), wanted)

    async def metrics_text(self) -> bytes:
        return b"flexfloor_workers 2\n"

    async def shutdown(self) -> None:
        if self._beats is not None:
            self._beats.cancel()
        for worker in self._workers:
            await worker.leave()
        for lease in self._held:
            await self._leases.release(lease)
        self._workers, self._held = [], []
