"""Starts that fail and runtimes that end, with workers that host vLLM: nothing is left behind."""

import asyncio
import json
import socket
import time
from pathlib import Path

import psutil
import pytest
import ray
from ray.util import list_named_actors

from actors.ray_coordinator import launch, shutdown_runtime
from actors.ray_leases import lease_prefix
from actors.ray_store import start_store
from actors.ray_tables import read_groups
from actors.ray_teardown import COORDINATOR_NAME, STORE_NAME
from actors.settings import LeaseSettings, RuntimeSettings
from deploy.make_model import ModelShape, make_model
from placement.errors import ConfigError, FlexFloorError, LeaseTimeoutError, ModelRefusedError
from tests.cluster.real_runtime import NUM_WORKERS, RealRuntime, batch, settings, until
from tests.cluster.started_job import other_job

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(240)]


def free_slots() -> float:
    return float(ray.available_resources().get("GPU", 0))


async def nothing_is_left(namespace: str) -> bool:
    leases = [row for row in read_groups(lease_prefix(namespace)) if row.state != "REMOVED"]
    actors = [a for a in list_named_actors(all_namespaces=True) if a["namespace"] == namespace]
    return not leases and not actors and free_slots() == NUM_WORKERS


async def refused(settings: RuntimeSettings) -> FlexFloorError:
    """The error of a launch that must fail, and leave nothing."""
    started_s = time.monotonic()
    with pytest.raises(FlexFloorError) as caught:
        await asyncio.to_thread(launch, settings)
    assert time.monotonic() - started_s < 60
    await until(lambda: nothing_is_left(settings.namespace), 5, "an empty namespace")
    return caught.value


async def test_a_model_directory_that_is_not_there_is_named_by_the_launch(
    namespace: str, tmp_path: Path
) -> None:
    error = await refused(settings(namespace, str(tmp_path / "nowhere")))
    assert isinstance(error, ConfigError)
    assert error.field == "model.path"
    assert "nowhere" in error.message


async def test_a_model_that_is_no_mixture_of_experts_is_refused_by_the_launch(
    namespace: str, tmp_path: Path
) -> None:
    dense = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    (tmp_path / "config.json").write_text(json.dumps(dense))
    error = await refused(settings(namespace, str(tmp_path)))
    assert isinstance(error, ModelRefusedError)
    assert "not a mixture of experts" in error.message


async def test_a_model_with_fewer_experts_than_workers_is_refused_by_the_launch(
    namespace: str, tmp_path: Path
) -> None:
    small = make_model(tmp_path / "model", shape=ModelShape(experts=2, top_k=2))
    error = await refused(settings(namespace, str(small)))
    assert error.field == "group.max_workers"
    assert "2 experts" in error.message


async def test_a_floor_above_what_the_cluster_has_ends_the_launch_with_both_numbers(
    namespace: str, model: str
) -> None:
    wanted = settings(namespace, model, max_workers=6, min_workers=5)
    short = LeaseSettings(acquire_timeout_s=3)
    error = await refused(wanted.model_copy(update={"lease": short}))
    assert isinstance(error, LeaseTimeoutError)
    assert "fewer than 5 of 6 leases" in error.message
    assert "4 slots on 1 node(s)" in error.message


async def test_a_floor_that_only_the_built_model_tells_is_kept_too(
    cluster: str, namespace: str, model: str
) -> None:
    """One slot is free, and two workers are needed to hold all experts beside one sample."""
    with other_job(cluster, num_slots=NUM_WORKERS - 1) as job:
        for _ in range(NUM_WORKERS):  # it waits, and then it has three slots
            await asyncio.to_thread(job.next_line)
        wanted = settings(namespace, model, kv_memory_bytes=4 << 20)
        short = LeaseSettings(acquire_timeout_s=3)
        with pytest.raises(LeaseTimeoutError, match="fewer than 2 of 4 leases"):
            await asyncio.to_thread(launch, wanted.model_copy(update={"lease": short}))
        assert free_slots() == 1
    await until(lambda: nothing_is_left(namespace), 10, "an empty namespace")


async def test_a_runtime_that_is_shut_down_in_a_rollout_leaves_no_lease_process_or_port(
    cluster: str, namespace: str, model: str
) -> None:
    client = await asyncio.to_thread(launch, settings(namespace, model, max_workers=2))
    runtime = RealRuntime(client, namespace, cluster)
    await client.submit(batch("cut short", (900,) * 8))
    await runtime.decoding("cut short", 40)
    rows = [runtime.process(name) for name in (COORDINATOR_NAME, STORE_NAME)]
    pids = [row.pid for row in rows if row is not None] + await runtime.member_pids()
    assert len(pids) == 4
    host, port = await start_store(namespace, reaper_timeout_s=60).address()
    socket.create_connection((host, port), timeout=5).close()
    await asyncio.to_thread(shutdown_runtime, namespace)
    assert not any(map(psutil.pid_exists, pids))
    assert await nothing_is_left(namespace)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, port), timeout=5)
    assert free_slots() == NUM_WORKERS
