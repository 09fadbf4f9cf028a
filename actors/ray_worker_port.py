"""The coordinator's side of a worker actor: start it in its lease, call it, see it end.

Every call has a bound from ``GroupSettings``. A worker that has died, does not answer, or fails
with an error that is not ours is lost: nobody knows in which state it is.
"""

import asyncio
import logging
from typing import Any

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.engines.environment import CPU_ENVIRONMENT
from actors.ports import Lease
from actors.protocol import (
    BuildReport,
    FinalizeReport,
    LoadReport,
    PrepareReport,
    WorkerReport,
    WorkerSpec,
)
from actors.ray_answers import await_answer, first_line
from actors.ray_processes import kill_actor
from actors.ray_tables import read_groups, read_nodes
from actors.ray_teardown import find_actor, worker_name
from actors.ray_worker import (
    CONCURRENCY_GROUPS,
    ENVIRONMENT,
    MEMBER,
    WorkerPlace,
    WorkerShell,
)
from actors.sample_kv import FetchedKv
from actors.settings import GroupSettings
from placement.errors import UnavailableError, WorkerLostError
from placement.ids import Generation, SampleId, WorkerId
from placement.membership import GroupChange
from placement.samples import Sample

logger = logging.getLogger(__name__)

_KILL_TIMEOUT_S = 20.0  # Ray kills a process that does not react after 5 s


class RayWorker:
    """``WorkerPort`` over a worker actor."""

    def __init__(self, worker_id: WorkerId, handle: ActorHandle, settings: GroupSettings) -> None:
        self.worker_id = worker_id
        self._handle = handle
        self._settings = settings

    async def place(self, timeout_s: float) -> WorkerPlace:
        """Where the process runs; the first call waits for its start."""
        return await self._call("place", timeout_s)

    async def build(self, spec: WorkerSpec) -> BuildReport:
        return await self._call("build", self._settings.build_timeout_s, spec)

    async def start(self) -> None:
        await self._call("start", self._settings.build_timeout_s)

    async def submit(self, samples: list[Sample], kv: FetchedKv | None = None) -> None:
        """The payload of ``kv`` is Ray's reference: the bytes go from worker to worker. If they
        are lost on the way (with a node), Ray does not make the call, and the samples go alone.
        """
        timeout_s = self._settings.collective_timeout_s
        if kv is not None:
            answer = self._handle.submit.remote(samples, kv.payload)
            try:
                await await_answer(
                    answer,
                    timeout_s,
                    who=worker_name(self.worker_id),
                    what="submit",
                    lost=WorkerLostError,
                )
            except RayError as error:
                logger.warning("KV of %d samples was lost: %s", len(samples), first_line(error))
            else:
                return
        await self._call("submit", timeout_s, samples)

    async def fetch_kv(self, sample_ids: list[SampleId]) -> FetchedKv:
        sizes, payload = self._handle.fetch_kv.remote(sample_ids)
        num_bytes_of = await self._answer("fetch_kv", sizes, self._settings.leave_timeout_s)
        return FetchedKv(tuple(num_bytes_of), sum(num_bytes_of.values()), payload)

    async def hold(self) -> None:
        await self._call("hold", self._settings.switch_timeout_s)

    async def unhold(self) -> None:
        await self._call("unhold", self._settings.switch_timeout_s)

    async def load_weights(self, version: str, chunks: tuple[Any, ...]) -> LoadReport:
        """The bytes go from the keeper's node to this worker's."""
        bound_s = self._settings.weights_timeout_s
        return await self._call("load_weights", bound_s, version, chunks, bound_s)

    async def cancel(self, sample_ids: list[SampleId], keep_kv: bool = False) -> None:
        await self._call("cancel", self._settings.collective_timeout_s, sample_ids, keep_kv)

    async def collect(self, acknowledged: int, wait_s: float) -> WorkerReport:
        bound_s = wait_s + self._settings.collective_timeout_s
        return await self._call("collect", bound_s, acknowledged, wait_s)

    async def prepare(self, change: GroupChange) -> PrepareReport:
        return await self._call("prepare", self._settings.prepare_timeout_s, change)

    async def discard(self, generation: Generation) -> None:
        await self._call("discard", self._settings.prepare_timeout_s, generation)

    async def switch(self, generation: Generation) -> None:
        await self._call("switch", self._settings.switch_timeout_s, generation)

    async def finalize(self, generation: Generation) -> FinalizeReport:
        return await self._call("finalize", self._settings.switch_timeout_s, generation)

    async def rollback(self, generation: Generation) -> None:
        await self._call("rollback", self._settings.switch_timeout_s, generation)

    async def leave(self) -> None:
        """A worker that does not leave within ``group.leave_timeout_s`` is killed."""
        try:
            await self._call("leave", self._settings.leave_timeout_s)
        except WorkerLostError as error:
            logger.info("%s", error)  # its end is what it was asked for
        finally:
            await self.kill()

    async def kill(self) -> None:
        await asyncio.to_thread(kill_actor, self._handle, _KILL_TIMEOUT_S)

    async def _call(self, method: str, timeout_s: float, *args: Any) -> Any:
        return await self._answer(method, getattr(self._handle, method).remote(*args), timeout_s)

    async def _answer(self, method: str, ref: "ObjectRef[Any]", timeout_s: float) -> Any:
        who = worker_name(self.worker_id)
        try:
            return await await_answer(ref, timeout_s, who=who, what=method, lost=WorkerLostError)
        except RayTaskError as error:
            raise WorkerLostError(
                f"{who} failed in {method} with {first_line(error.cause)}; its log has the trace"
            ) from error


class RayWorkerFactory:
    """``WorkerFactory`` over Ray.

    Args:
        member: import path of what the workers host.
    """

    def __init__(self, settings: GroupSettings, namespace: str, member: str = MEMBER) -> None:
        self._settings = settings
        self._namespace = namespace
        self._member = member

    async def spawn(self, worker_id: WorkerId, lease: Lease) -> RayWorker:
        """Returns when the process runs.

        Raises:
            UnavailableError: the lease has gone.
            WorkerLostError: the process did not start.
        """
        handle = await asyncio.to_thread(self._create, worker_id, lease)
        worker = RayWorker(worker_id, handle, self._settings)
        try:
            await worker.place(self._settings.build_timeout_s)
        except BaseException:
            await worker.kill()
            raise
        return worker

    async def attach(self, worker_id: WorkerId) -> RayWorker | None:
        """A worker that is there but does not answer is ended: nobody else can reach it."""
        name = worker_name(worker_id)
        handle = await asyncio.to_thread(find_actor, name, self._namespace)
        if handle is None:
            return None
        worker = RayWorker(worker_id, handle, self._settings)
        try:
            await worker.place(self._settings.collective_timeout_s)
        except WorkerLostError:
            await worker.kill()
            return None
        return worker

    def _create(self, worker_id: WorkerId, lease: Lease) -> ActorHandle:
        rows = [row for row in read_groups(lease.name) if row.state == "CREATED"]
        if not rows:
            raise UnavailableError(
                f"lease {lease.name} for {worker_name(worker_id)} has gone: "
                "its node died or somebody removed it; acquire another one"
            )
        bundle = dict(rows[0].bundle)
        real = any(n.node_id == rows[0].node_id and n.has_accelerator for n in read_nodes())
        return (
            ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(WorkerShell)
            .options(
                name=worker_name(worker_id),
                namespace=self._namespace,
                lifetime="detached",
                max_restarts=0,
                num_cpus=bundle.pop("CPU", 0),
                num_gpus=bundle.pop("GPU", 0),
                memory=bundle.pop("memory", None),
                resources=bundle,
                scheduling_strategy=PlacementGroupSchedulingStrategy(rows[0].placement_group(), 0),
                runtime_env={"env_vars": ENVIRONMENT if real else ENVIRONMENT | CPU_ENVIRONMENT},
            )
            .remote(self._member)
        )
