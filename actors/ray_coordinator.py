"""The coordinator as a Ray actor: its shell, how it is launched, found and ended.

Detached and restarted by Ray without limit: it re-attaches to its workers through the store's
record. ``launch``, ``connect`` and ``shutdown_runtime`` block and need an initialised Ray.
"""

import asyncio
import importlib
import logging
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from actors.control_api import PauseMode, PauseStatus, WeightsGroup, WeightStatus, WeightUpdate
from actors.durable_journal import open_journal
from actors.journal import Journal, MemoryJournal
from actors.model_check import check_model
from actors.ray_answers import first_line, own_error
from actors.ray_coordinator_client import CoordinatorClient
from actors.ray_leases import RayLeases
from actors.ray_store import RayGroupStore, start_store
from actors.ray_teardown import (
    COORDINATOR_NAME,
    STORE_NAME,
    end_named_actor,
    end_workers_and_leases,
    find_actor,
)
from actors.ray_weights import weights_keeper
from actors.ray_worker import MEMBER
from actors.ray_worker_port import RayWorkerFactory
from actors.rollout_api import (
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
from actors.settings import RuntimeSettings
from placement.errors import ConfigError, FlexFloorError, UnavailableError
from placement.ids import RolloutId, SampleId

logger = logging.getLogger(__name__)

COORDINATOR = "actors.coordinator:Coordinator"
"""Import path of the class that the shell hosts."""

_MAX_CALLS = 4096  # every waiting client holds one call
_POLL_S = 1.0
_PROCESS_START_S = 60.0  # a busy machine needs several seconds for the store and coordinator
_END_TIMEOUT_S = 30.0
_ORDERLY_END_TIMEOUT_S = 120.0


class CoordinatorShell:
    """What runs in the coordinator's process.

    Calls wait until the start has ended, and raise its error if it failed. ``health`` and
    ``shutdown`` do not wait.
    """

    async def __init__(  # type: ignore[misc]  # Ray awaits it: there is a loop for the task
        self, settings: RuntimeSettings, coordinator: str, member: str
    ) -> None:
        self._settings = settings
        self._coordinator: Any = None
        self._start = asyncio.create_task(self._begin(coordinator, member))
        self._start.add_done_callback(_log_failure)

    async def _begin(self, coordinator: str, member: str) -> None:
        settings = self._settings
        module, _, name = coordinator.partition(":")
        hosted = getattr(importlib.import_module(module), name)
        store = await asyncio.to_thread(_start_store, settings)
        leases = RayLeases(settings.lease, settings.namespace)
        factory = RayWorkerFactory(settings.group, settings.namespace, member)
        keeper = weights_keeper(
            settings.namespace,
            settings.model.path,
            settings.group.weights_timeout_s,
            settings.coordinator.resources,
        )
        journal = await asyncio.to_thread(_open_journal, settings)
        self._coordinator = hosted(settings, leases, factory, store, keeper=keeper, journal=journal)
        await self._coordinator.start()

    async def started(self, wait_s: float) -> tuple[bool, str]:
        """Whether the start has ended well within ``wait_s``, and what it waits for.

        Raises: the start's error.
        """
        done, _ = await asyncio.wait({self._start}, timeout=wait_s)
        if done:
            self._start.result()
            return True, "serving"
        if self._coordinator is not None:
            try:
                await self._coordinator.served_model()
            except UnavailableError as error:  # it says what the start waits for
                return False, error.message
        return False, "the coordinator starts"

    async def served_model(self) -> ServedModel:
        return await (await self._serving()).served_model()

    async def submit(self, request: RolloutRequest) -> RolloutStatus:
        return await (await self._serving()).submit(request)

    async def status(self, rollout_id: RolloutId) -> RolloutStatus:
        return await (await self._serving()).status(rollout_id)

    async def results(
        self, rollout_id: RolloutId, cursor: int, wait_s: float, limit: int
    ) -> FinishedBatch:
        return await (await self._serving()).results(rollout_id, cursor, wait_s, limit)

    async def tokens(
        self, rollout_id: RolloutId, known: tuple[int | None, ...], wait_s: float
    ) -> tuple[SampleNews, ...]:
        return await (await self._serving()).tokens(rollout_id, known, wait_s)

    async def tokens_of(
        self, wishes: tuple[TokenWish, ...], wait_s: float
    ) -> tuple[tuple[SampleNews, ...] | FlexFloorError | None, ...]:
        return await (await self._serving()).tokens_of(wishes, wait_s)

    async def new_tokens(
        self, rollout_id: RolloutId, cursor: int, wait_s: float, limit: int
    ) -> TokenBatch:
        return await (await self._serving()).new_tokens(rollout_id, cursor, wait_s, limit)

    async def abort(
        self, rollout_id: RolloutId, sample_ids: tuple[SampleId, ...] | None = None
    ) -> FinishedBatch:
        return await (await self._serving()).abort(rollout_id, sample_ids)

    async def open_rollouts(self) -> list[RolloutStatus]:
        return await (await self._serving()).open_rollouts()

    async def workers(self) -> list[WorkerStatus]:
        return await (await self._serving()).workers()

    async def operations(self) -> list[OperationStatus]:
        return await (await self._serving()).operations()

    async def health(self) -> Health:
        if self._coordinator is None:
            await self._serving()
        return await self._coordinator.health()

    async def metrics_text(self) -> bytes:
        return await (await self._serving()).metrics_text()

    async def pause(self, mode: PauseMode, wait_s: float) -> PauseStatus:
        return await (await self._serving()).pause(mode, wait_s)

    async def resume(self) -> PauseStatus:
        return await (await self._serving()).resume()

    async def pause_status(self, wait_s: float) -> PauseStatus:
        return await (await self._serving()).pause_status(wait_s)

    async def sleep(self, mode: PauseMode, wait_s: float) -> PauseStatus:
        return await (await self._serving()).sleep(mode, wait_s)

    async def wake(self, wait_s: float, stay_paused: bool) -> PauseStatus:
        return await (await self._serving()).wake(wait_s, stay_paused=stay_paused)

    async def reset_prefix_cache(self, running: bool) -> bool:
        return await (await self._serving()).reset_prefix_cache(running=running)

    async def update_weights(self, update: WeightUpdate) -> WeightStatus:
        return await (await self._serving()).update_weights(update)

    async def weight_status(self) -> WeightStatus:
        return await (await self._serving()).weight_status()

    async def init_weights_group(self, group: WeightsGroup) -> None:
        await (await self._serving()).init_weights_group(group)

    async def destroy_weights_group(self, name: str) -> None:
        await (await self._serving()).destroy_weights_group(name)

    async def shutdown(self) -> None:
        if self._coordinator is not None:
            await self._coordinator.shutdown()

    async def _serving(self) -> Any:
        await asyncio.shield(self._start)
        return self._coordinator


def _log_failure(start: "asyncio.Task[None]") -> None:
    """After a restart by Ray nobody else may ever ask how the start went."""
    if not start.cancelled() and (error := start.exception()) is not None:
        logger.error("the coordinator's start failed", exc_info=error)


def connect(namespace: str) -> CoordinatorClient:
    """A client of the running coordinator.

    Raises:
        UnavailableError: none runs in this namespace.
    """
    handle = find_actor(COORDINATOR_NAME, namespace)
    if handle is None:
        raise UnavailableError(
            f"no coordinator runs in Ray namespace {namespace!r}; start one with `flexfloor serve`"
        )
    return CoordinatorClient(handle)


def launch(
    settings: RuntimeSettings,
    *,
    say: Callable[[str], None] = logger.info,
    coordinator: str = COORDINATOR,
    member: str = MEMBER,
) -> CoordinatorClient:
    """Start the store and the coordinator, and return when it serves.

    What a dead runtime has left in the namespace is ended first. If the start fails or is
    interrupted, everything that was started is ended again.

    Args:
        say: is told what is awaited, as it changes.
        coordinator, member: import paths of what the actors host.

    Raises:
        ConfigError: a coordinator runs already in this namespace.
        ConfigError, ModelRefusedError: vLLM cannot serve this model here.
        FlexFloorError: the coordinator's start failed with it.
        UnavailableError: it did not serve within the bounds of lease and build.
    """
    namespace = settings.namespace
    if member == MEMBER:  # others judge their model when they build
        check_model(settings)
    if find_actor(COORDINATOR_NAME, namespace) is not None:
        raise ConfigError(
            f"a coordinator runs already in Ray namespace {namespace!r}; "
            "connect to it, end it, or choose another namespace",
            field="namespace",
        )
    # Workers of one that ended without a farewell were built from other settings than these.
    shutdown_runtime(namespace, say=logger.info)
    try:
        _start_store(settings)
        handle = (
            ray.remote(CoordinatorShell)
            .options(
                name=COORDINATOR_NAME,
                namespace=namespace,
                lifetime="detached",
                max_restarts=-1,
                max_concurrency=_MAX_CALLS,
                num_cpus=0,
                resources=settings.coordinator.resources,
            )
            .remote(settings, coordinator, member)
        )
        _wait_until_it_serves(handle, settings, say)
    except BaseException:
        shutdown_runtime(namespace, say=say)
        raise
    return CoordinatorClient(handle)


def shutdown_runtime(namespace: str, *, say: Callable[[str], None] = logger.info) -> None:
    """End coordinator, workers, leases and store: nothing of ours is left in the cluster.

    Idempotent, and does not need a coordinator that works.

    Raises:
        UnavailableError: a process or a lease could not be ended; it names it.
    """
    handle = find_actor(COORDINATOR_NAME, namespace)
    if handle is not None:
        try:
            ray.get(handle.shutdown.remote(), timeout=_ORDERLY_END_TIMEOUT_S)
        except (RayError, GetTimeoutError) as error:
            say(f"the coordinator did not shut down in order: {first_line(error)}")
    end_named_actor(COORDINATOR_NAME, namespace, _END_TIMEOUT_S)
    say(end_workers_and_leases(namespace, _END_TIMEOUT_S))
    end_named_actor(STORE_NAME, namespace, _END_TIMEOUT_S)


def _start_store(settings: RuntimeSettings) -> RayGroupStore:
    bounds = settings.coordinator
    return start_store(settings.namespace, bounds.reaper_timeout_s, bounds.resources)


def _open_journal(settings: RuntimeSettings) -> Journal:
    """Raises: ConfigError."""
    bounds = settings.coordinator
    if not bounds.journal_dir:
        return MemoryJournal()
    return open_journal(bounds.journal_dir, settings.model.path, bounds.journal_max_bytes)


def _wait_until_it_serves(
    handle: ActorHandle, settings: RuntimeSettings, say: Callable[[str], None]
) -> None:
    bound_s = (
        _PROCESS_START_S
        + settings.lease.acquire_timeout_s
        + settings.group.build_timeout_s
        + settings.group.prepare_timeout_s
    )
    deadline_s = time.monotonic() + bound_s
    said = "the coordinator's process starts"
    say(said)
    while (left_s := deadline_s - time.monotonic()) > 0:
        try:
            done, detail = ray.get(handle.started.remote(_POLL_S), timeout=left_s + _POLL_S)
        except RayTaskError as error:
            raise own_error(error) or error from None
        except GetTimeoutError:
            break
        except RayError as error:
            raise UnavailableError(
                f"the coordinator's process ended during its start: {first_line(error)}; "
                "its log has the reason"
            ) from error
        if detail != said:
            say(detail)
            said = detail
        if done:
            return
    raise UnavailableError(
        f"the coordinator does not serve after {bound_s:g} s (last: {said}); raise "
        "lease.acquire_timeout_s or group.build_timeout_s, or look at its log"
    )
