"""The real coordinator, store, leases and worker actors; only the members are fake."""

import asyncio
import os
import signal
import time

import psutil
import pytest
from ray.util import list_named_actors

from actors.ray_coordinator import launch, shutdown_runtime
from actors.ray_coordinator_client import CoordinatorClient
from actors.ray_leases import RayLeases
from actors.ray_processes import kill_actor
from actors.ray_tables import read_process
from actors.ray_teardown import COORDINATOR_NAME, STORE_NAME, find_actor
from actors.rollout_api import RolloutRequest, SampleResult
from actors.settings import LeaseSettings, RuntimeSettings
from placement.errors import UnavailableError
from placement.ids import RolloutId
from placement.membership import Phase
from placement.samples import FinishReason, Sampling

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]


def start(namespace: str, max_workers: int, idle_workers: str) -> CoordinatorClient:
    settings = RuntimeSettings.model_validate(
        {
            "model": {"path": "fake", "max_model_len": 128},
            "group": {
                "max_workers": max_workers,
                "max_samples_per_worker": 4,
                "idle_workers": idle_workers,
                "build_timeout_s": 60,
            },
            "coordinator": {"reaper_timeout_s": 9},  # the heart beats every three seconds
            "namespace": namespace,
        }
    )
    return launch(settings, member="tests.cluster.fake_member:FakeMember")


def rollout(name: str, lengths: tuple[int, ...]) -> RolloutRequest:
    prompts = tuple((1, 2, 3 + i) for i in range(len(lengths)))
    samplings = tuple(Sampling(max_tokens=length) for length in lengths)
    return RolloutRequest(RolloutId(name), prompts, 1, samplings, seed=7)


async def finished(client: CoordinatorClient, name: str) -> list[SampleResult]:
    samples: list[SampleResult] = []
    cursor, done = 0, False
    async with asyncio.timeout(60):
        while not done:
            batch = await client.results(RolloutId(name), cursor, 2.0, 100)
            samples += batch.samples
            cursor, done = batch.cursor, batch.done
    return samples


async def test_a_long_tail_gives_a_worker_back_and_loses_no_token(namespace: str) -> None:
    client = await asyncio.to_thread(start, namespace, 2, "floor")
    lengths = (5, 5, 120, 5, 5, 120)
    await client.submit(rollout("tail", lengths))
    samples = await finished(client, "tail")
    assert [len(s.token_ids) for s in sorted(samples, key=lambda s: s.prompt_index)] == [*lengths]
    assert all(s.token_ids == tuple(range(len(s.token_ids))) for s in samples)
    assert {s.finish_reason for s in samples} == {FinishReason.LENGTH}
    done = [o for o in await client.operations() if o.phase is Phase.DONE]
    assert len(done[0].new_members) == 1
    usage = (await client.status(RolloutId("tail"))).usage
    assert usage.freed_worker_s > 0
    assert len(await RayLeases(LeaseSettings(), namespace).existing()) == 1


async def test_a_killed_coordinator_takes_its_workers_over_and_serves_again(
    namespace: str,
) -> None:
    client = await asyncio.to_thread(start, namespace, 2, "all")
    before = {worker.pid for worker in await client.workers()}
    process = read_process(find_actor(COORDINATOR_NAME, namespace))
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        try:
            await client.submit(rollout("again", (4, 4)))
            break
        except UnavailableError:  # it is being restarted
            await asyncio.sleep(0.2)
    assert len(await finished(client, "again")) == 2
    assert {worker.pid for worker in await client.workers()} == before


async def test_a_killed_store_costs_the_group_and_the_next_one_meets_in_a_new_store(
    namespace: str,
) -> None:
    client = await asyncio.to_thread(start, namespace, 2, "all")
    before = {worker.pid for worker in await client.workers()}
    store = find_actor(STORE_NAME, namespace)
    await asyncio.to_thread(kill_actor, store, 10)
    async with asyncio.timeout(60):
        while before & {w.pid for w in await client.workers()} or not await is_whole(client, 2):
            await asyncio.sleep(0.1)
    assert not any(map(psutil.pid_exists, before))
    assert len(await RayLeases(LeaseSettings(), namespace).existing()) == 2
    assert find_actor(STORE_NAME, namespace) not in {None, store}
    await client.submit(rollout("again", (4, 4)))
    assert len(await finished(client, "again")) == 2


async def is_whole(client: CoordinatorClient, num_workers: int) -> bool:
    return sum(worker.rank is not None for worker in await client.workers()) == num_workers


async def test_shutting_down_in_the_middle_of_a_rollout_leaves_nothing(namespace: str) -> None:
    client = await asyncio.to_thread(start, namespace, 2, "all")
    await client.submit(rollout("cut", (120, 120, 120, 120)))
    pids = [worker.pid for worker in await client.workers()]
    await asyncio.to_thread(shutdown_runtime, namespace)
    assert not any(map(psutil.pid_exists, pids))
    assert await RayLeases(LeaseSettings(), namespace).existing() == []
    assert namespace not in {a["namespace"] for a in list_named_actors(all_namespaces=True)}
