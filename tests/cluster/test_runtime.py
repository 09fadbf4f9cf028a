"""Launching, finding, losing and ending the coordinator, with a fake one inside."""

import asyncio
import os
import signal
from typing import Any

import psutil
import pytest
from ray.util import list_named_actors

from actors.ray_coordinator import connect, launch, shutdown_runtime
from actors.ray_coordinator_client import CoordinatorClient
from actors.ray_leases import RayLeases
from actors.ray_tables import read_process
from actors.ray_teardown import (
    COORDINATOR_NAME,
    STORE_NAME,
    end_named_actor,
    find_actor,
    worker_name,
)
from actors.rollout_api import RolloutRequest
from actors.settings import LeaseSettings, RuntimeSettings
from placement.errors import (
    ConfigError,
    LeaseTimeoutError,
    RequestError,
    UnavailableError,
    UnknownIdError,
)
from placement.ids import RolloutId, WorkerId

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

FAKES = {
    "coordinator": "tests.cluster.fake_coordinator:FakeCoordinator",
    "member": "tests.cluster.fake_member:FakeMember",
}


def settings(namespace: str, max_workers: int = 2, model: str = "fake") -> RuntimeSettings:
    return RuntimeSettings.model_validate(
        {
            "model": {"path": model},
            "group": {"max_workers": max_workers, "build_timeout_s": 30},
            "lease": {"acquire_timeout_s": 3},
            "namespace": namespace,
        }
    )


def pids_of(namespace: str) -> list[int]:
    names = (COORDINATOR_NAME, STORE_NAME, worker_name(WorkerId(0)), worker_name(WorkerId(1)))
    handles = [find_actor(name, namespace) for name in names]
    rows = [read_process(handle) for handle in handles if handle is not None]
    return [row.pid for row in rows if row is not None]


async def nothing_is_left(namespace: str) -> bool:
    leases = await RayLeases(LeaseSettings(), namespace).existing()
    actors = [a for a in list_named_actors(all_namespaces=True) if a["namespace"] == namespace]
    return not leases and not actors


async def test_a_launched_runtime_serves_and_ends_without_a_trace(namespace: str) -> None:
    said: list[str] = []
    client = await asyncio.to_thread(launch, settings(namespace), say=said.append, **FAKES)
    assert said[-1] == "serving"
    assert (await client.served_model()).path == "fake"
    assert len(await connect(namespace).workers()) == 2
    assert await client.metrics_text() == b"flexfloor_workers 2\n"
    pids = pids_of(namespace)
    assert len(pids) == 4
    await asyncio.to_thread(shutdown_runtime, namespace)
    assert not any(map(psutil.pid_exists, pids))
    assert await nothing_is_left(namespace)
    await asyncio.to_thread(shutdown_runtime, namespace)  # idempotent


async def test_errors_reach_the_caller_with_type_and_field(namespace: str) -> None:
    client = await asyncio.to_thread(launch, settings(namespace, 1), **FAKES)
    request = RolloutRequest(RolloutId("r"), ((),), 1, (), 0)
    with pytest.raises(RequestError, match="send at least one token") as refused:
        await client.submit(request)
    assert refused.value.field == "prompts[0]"
    with pytest.raises(UnknownIdError):
        await client.status(RolloutId("r"))
    batch = await client.results(RolloutId("r"), 5, 0.2, 10)
    assert batch.cursor == 5


async def test_a_start_that_fails_says_why_and_leaves_nothing(namespace: str) -> None:
    with pytest.raises(LeaseTimeoutError, match="waiting for 1 of 5 leases") as failed:
        await asyncio.to_thread(launch, settings(namespace, 5), **FAKES)
    assert failed.value.field == "group.max_workers"
    assert await nothing_is_left(namespace)


async def test_a_model_that_a_worker_refuses_ends_the_launch_with_its_error(
    namespace: str,
) -> None:
    with pytest.raises(ConfigError, match="512 is more than 128") as refused:
        await asyncio.to_thread(launch, settings(namespace, 1, model="refused"), **FAKES)
    assert refused.value.field == "model.max_model_len"
    assert await nothing_is_left(namespace)


async def test_a_second_launch_in_the_same_namespace_is_refused(namespace: str) -> None:
    first = await asyncio.to_thread(launch, settings(namespace, 1), **FAKES)
    with pytest.raises(ConfigError, match="runs already"):
        await asyncio.to_thread(launch, settings(namespace, 1), **FAKES)
    assert len(await first.workers()) == 1


async def test_a_launch_does_not_inherit_what_a_dead_runtime_left(namespace: str) -> None:
    await asyncio.to_thread(launch, settings(namespace), **FAKES)
    left = pids_of(namespace)
    await asyncio.to_thread(end_named_actor, COORDINATOR_NAME, namespace, 10)
    client = await asyncio.to_thread(launch, settings(namespace, 1, model="other"), **FAKES)
    assert not any(map(psutil.pid_exists, left))
    assert (await client.served_model()).path == "other"
    assert len(await RayLeases(LeaseSettings(), namespace).existing()) == 1


def test_connecting_to_nothing_says_so(namespace: str) -> None:
    with pytest.raises(UnavailableError, match="no coordinator runs"):
        connect(namespace)


async def answer_after_restart(client: CoordinatorClient) -> Any:
    async with asyncio.timeout(60):
        while True:
            try:
                return await client.workers()
            except UnavailableError:
                await asyncio.sleep(0.2)


async def test_a_killed_coordinator_comes_back_and_finds_its_workers(
    namespace: str, record_property: Any
) -> None:
    client = await asyncio.to_thread(launch, settings(namespace), **FAKES)
    pids = pids_of(namespace)
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    os.kill(pids[0], signal.SIGKILL)
    assert len(await answer_after_restart(client)) == 2
    record_property("restart_s", loop.time() - started_s)
    assert pids_of(namespace)[1:] == pids[1:]
    assert pids_of(namespace)[0] != pids[0]


async def test_a_runtime_whose_coordinator_hangs_can_be_ended(
    namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.ray_coordinator._ORDERLY_END_TIMEOUT_S", 0.5)
    await asyncio.to_thread(launch, settings(namespace), **FAKES)
    pids = pids_of(namespace)
    os.kill(pids[0], signal.SIGSTOP)
    said: list[str] = []
    await asyncio.to_thread(shutdown_runtime, namespace, say=said.append)
    assert said[0].startswith("the coordinator did not shut down in order")
    assert not any(map(psutil.pid_exists, pids))
    assert await nothing_is_left(namespace)
