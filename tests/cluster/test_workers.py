"""Worker actors in their leases, with a fake member inside."""

import asyncio
import os
import signal
import time
from dataclasses import replace
from typing import Any

import psutil
import pytest
import ray

from actors.ports import Lease
from actors.protocol import Tokens
from actors.ray_leases import RayLeases
from actors.ray_processes import ask_node
from actors.ray_tables import read_process
from actors.ray_teardown import find_actor, worker_name
from actors.ray_worker_port import RayWorker, RayWorkerFactory
from actors.settings import GroupSettings, LeaseSettings
from placement.errors import (
    ConfigError,
    ExpertChecksumError,
    MembershipError,
    UnavailableError,
    WorkerLostError,
)
from placement.ids import Generation, SampleId, WorkerId
from placement.membership import GroupChange
from placement.samples import Sample, Sampling
from tests.cluster.fake_member import make_spec

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(90)]

SETTINGS = GroupSettings(build_timeout_s=30, leave_timeout_s=5)
FAKE = "tests.cluster.fake_member:FakeMember"


@pytest.fixture
def leases(namespace: str) -> RayLeases:
    return RayLeases(LeaseSettings(), namespace)


@pytest.fixture
def factory(namespace: str) -> RayWorkerFactory:
    return RayWorkerFactory(SETTINGS, namespace, FAKE)


@pytest.fixture
async def lease(leases: RayLeases) -> Lease:
    (lease,) = await leases.acquire(1, 10, print)
    return lease


async def built(factory: RayWorkerFactory, lease: Lease) -> tuple[RayWorker, int]:
    worker = await factory.spawn(WorkerId(3), lease)
    report = await worker.build(make_spec(3))
    return worker, report.pid


async def test_a_build_report_says_where_the_worker_runs(
    factory: RayWorkerFactory, lease: Lease
) -> None:
    worker = await factory.spawn(WorkerId(3), lease)
    report = await worker.build(make_spec(3))
    assert report.node_id == lease.node_id
    assert report.slot in {f"GPU:{n}" for n in range(4)}
    assert psutil.Process(report.pid).is_running()
    environment = report.exact_report
    assert environment["CUDA_VISIBLE_DEVICES"] == report.slot.removeprefix("GPU:")
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert environment["OMP_NUM_THREADS"] == "1"  # Ray detected no accelerator here


async def test_a_long_poll_does_not_hold_back_a_submission_and_ends_with_it(
    factory: RayWorkerFactory, lease: Lease
) -> None:
    worker, _ = await built(factory, lease)
    await worker.start()
    poll = asyncio.create_task(worker.collect(0, 20))
    assert (await worker.collect(0, 0.3)).cursor == 0
    started_s = time.monotonic()
    await worker.submit([Sample(SampleId("r/0/0"), (1, 2), Sampling(8), seed=1)])
    assert (await poll).events[0] == Tokens(SampleId("r/0/0"), 0, (0,), (-0.5,))
    assert time.monotonic() - started_s < 5


async def test_our_errors_cross_the_border_with_type_message_and_field(
    factory: RayWorkerFactory, lease: Lease
) -> None:
    worker = await factory.spawn(WorkerId(3), lease)
    with pytest.raises(MembershipError, match="has not been built"):
        await worker.start()
    with pytest.raises(ConfigError) as refused:
        await worker.build(make_spec(3, model="refused"))
    assert type(refused.value) is ConfigError
    assert refused.value.field == "model.max_model_len"
    assert refused.value.message == "512 is more than 128; lower it"
    await worker.build(make_spec(3))
    only = (WorkerId(3),)
    change = GroupChange(Generation(12), only, only, (), only * 4, ())
    assert (await worker.prepare(change)).experts == (0, 1, 2, 3)
    with pytest.raises(ExpertChecksumError) as damaged:
        await worker.prepare(replace(change, generation=Generation(13)))
    assert type(damaged.value) is ExpertChecksumError


async def test_a_bug_in_a_worker_makes_it_a_lost_one(
    factory: RayWorkerFactory, lease: Lease
) -> None:
    worker = await factory.spawn(WorkerId(3), lease)
    with pytest.raises(WorkerLostError, match=r"worker-3 failed in build with .*a bug in the"):
        await worker.build(make_spec(3, model="bug"))


async def test_a_killed_process_ends_pending_calls_within_two_seconds(
    factory: RayWorkerFactory, lease: Lease, record_property: Any
) -> None:
    worker, pid = await built(factory, lease)
    poll = asyncio.create_task(worker.collect(0, 60))
    await worker.cancel([])  # the poll has been sent before this was answered
    killed_s = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerLostError, match="worker-3 ended before it answered collect"):
        await poll
    seconds = time.monotonic() - killed_s
    record_property("death_to_error_s", seconds)
    assert seconds < 2
    with pytest.raises(WorkerLostError):
        await worker.submit([])


async def test_a_worker_that_does_not_answer_is_lost_at_the_bound(
    namespace: str, factory: RayWorkerFactory, lease: Lease
) -> None:
    _, pid = await built(factory, lease)
    hasty = RayWorkerFactory(SETTINGS.model_copy(update={"collective_timeout_s": 0.5}), namespace)
    worker = await hasty.attach(WorkerId(3))
    assert worker is not None
    os.kill(pid, signal.SIGSTOP)
    started_s = time.monotonic()
    with pytest.raises(WorkerLostError, match=r"did not answer cancel within 0\.5 s"):
        await worker.cancel([])
    assert time.monotonic() - started_s < 3
    await worker.kill()
    assert not psutil.pid_exists(pid)


async def test_kill_returns_after_a_stopped_process_has_gone(
    factory: RayWorkerFactory, lease: Lease, record_property: Any
) -> None:
    worker, pid = await built(factory, lease)
    os.kill(pid, signal.SIGSTOP)
    started_s = time.monotonic()
    await worker.kill()
    assert not psutil.pid_exists(pid)
    record_property("kill_stopped_s", time.monotonic() - started_s)
    await worker.kill()  # idempotent


async def test_leave_returns_after_the_process_has_gone_though_a_poll_was_waiting(
    factory: RayWorkerFactory, lease: Lease, record_property: Any
) -> None:
    worker, pid = await built(factory, lease)
    poll = asyncio.create_task(worker.collect(0, 60))
    started_s = time.monotonic()
    await worker.leave()
    assert not psutil.pid_exists(pid)
    seconds = time.monotonic() - started_s
    record_property("leave_s", seconds)
    assert seconds < SETTINGS.leave_timeout_s
    with pytest.raises(WorkerLostError):
        await poll


async def test_the_end_of_a_process_can_be_seen_from_another_node(
    namespace: str, factory: RayWorkerFactory, lease: Lease
) -> None:
    """The task that asks another node, sent to this one."""
    _, pid = await built(factory, lease)
    process = read_process(find_actor(worker_name(WorkerId(3)), namespace))
    assert process is not None
    assert process.pid == pid
    assert not await asyncio.to_thread(ask_node, process, 0.2)
    os.kill(pid, signal.SIGKILL)
    assert await asyncio.to_thread(ask_node, process, 10)


async def test_a_later_coordinator_attaches_to_a_living_worker_only(
    factory: RayWorkerFactory, lease: Lease, leases: RayLeases
) -> None:
    worker, pid = await built(factory, lease)
    again = await factory.attach(WorkerId(3))
    assert again is not None
    assert (await again.place(5)).pid == pid
    assert await factory.attach(WorkerId(4)) is None
    await worker.leave()
    assert await factory.attach(WorkerId(3)) is None
    await leases.release(lease)
    assert await leases.existing() == []


async def test_a_worker_that_hangs_is_ended_instead_of_attached(
    namespace: str, factory: RayWorkerFactory, lease: Lease
) -> None:
    _, pid = await built(factory, lease)
    os.kill(pid, signal.SIGSTOP)
    hasty = RayWorkerFactory(SETTINGS.model_copy(update={"collective_timeout_s": 0.5}), namespace)
    assert await hasty.attach(WorkerId(3)) is None
    assert not psutil.pid_exists(pid)


async def test_a_worker_without_its_lease_does_not_start(
    factory: RayWorkerFactory, lease: Lease, leases: RayLeases
) -> None:
    await leases.release(lease)
    with pytest.raises(UnavailableError, match="has gone"):
        await factory.spawn(WorkerId(3), lease)


async def test_removing_a_lease_too_early_is_seen_as_a_lost_worker(
    factory: RayWorkerFactory, lease: Lease, leases: RayLeases
) -> None:
    worker, _ = await built(factory, lease)
    poll = asyncio.create_task(worker.collect(0, 60))
    await worker.cancel([])
    await leases.release(lease)
    with pytest.raises(WorkerLostError):
        await poll


async def test_a_process_that_cannot_start_is_a_lost_worker_and_leaves_no_name(
    namespace: str, lease: Lease
) -> None:
    """Its lease is held by another actor, so Ray never starts this one."""
    first = RayWorkerFactory(SETTINGS, namespace, FAKE)
    await first.spawn(WorkerId(3), lease)
    hasty = RayWorkerFactory(SETTINGS.model_copy(update={"build_timeout_s": 0.5}), namespace, FAKE)
    with pytest.raises(WorkerLostError, match=r"did not answer place within 0\.5 s"):
        await hasty.spawn(WorkerId(4), lease)
    with pytest.raises(ValueError, match="worker-4"):
        ray.get_actor("worker-4", namespace=namespace)
