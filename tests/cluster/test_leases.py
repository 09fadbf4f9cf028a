"""Leases against a real Ray cluster of four logical GPUs."""

import asyncio
import time
from typing import Any

import pytest

from actors.ports import Lease
from actors.ray_leases import RayLeases
from actors.ray_tables import read_groups
from actors.settings import LeaseSettings
from placement.errors import ConfigError
from tests.cluster.started_job import other_job

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(90)]


@pytest.fixture
def leases(namespace: str) -> RayLeases:
    return RayLeases(LeaseSettings(), namespace)


class FakeListener(list[str]):
    """Remembers what it is told."""

    def __call__(self, text: str) -> None:
        self.append(text)


async def wait_for_others(leases: RayLeases, slots: float) -> None:
    async with asyncio.timeout(20):
        while sum((await leases.slots_of_others()).values()) != slots:
            await asyncio.sleep(0.02)


async def test_each_worker_gets_a_lease_of_its_own(leases: RayLeases) -> None:
    said = FakeListener()
    asked_at = time.time()
    granted = await leases.acquire(4, 10, said)
    assert len({lease.name for lease in granted}) == 4
    assert all(asked_at - 0.1 <= lease.granted_at <= time.time() for lease in granted)
    assert await leases.total_slots() == 4
    assert said == []


async def test_a_full_cluster_grants_what_it_has_and_says_why(leases: RayLeases) -> None:
    said = FakeListener()
    started_s = time.monotonic()
    granted = await leases.acquire(6, 3.0, said)
    assert len(granted) == 4
    assert 2.9 < time.monotonic() - started_s < 6
    last = said[-1]  # on a busy machine it looks before the first is granted, too
    assert last.startswith("waiting for 2 of 6 leases of {'GPU': 1.0}: 4 slots on 1 node(s)")
    assert "0 free" in last
    assert last.endswith("NO_RESOURCES for 2")


async def test_requests_that_wait_are_cancelled_at_the_bound(
    leases: RayLeases, namespace: str
) -> None:
    granted = await leases.acquire(5, 1.0, FakeListener())
    for lease in granted:
        await leases.release(lease)
    # A request that still waited would be granted now.
    assert await leases.existing() == []
    states = [row.state for row in read_groups(f"{namespace}.lease.")]
    assert states == ["REMOVED"] * 5


async def test_a_cancelled_acquisition_leaves_nothing_behind(leases: RayLeases) -> None:
    acquisition = asyncio.create_task(leases.acquire(5, 30, FakeListener()))
    async with asyncio.timeout(10):
        while len(await leases.existing()) < 4:
            await asyncio.sleep(0.02)
    acquisition.cancel()
    with pytest.raises(asyncio.CancelledError):
        await acquisition
    assert await leases.existing() == []


async def test_a_bundle_that_no_node_can_hold_is_called_infeasible(namespace: str) -> None:
    said = FakeListener()
    leases = RayLeases(LeaseSettings(resources={"GPU": 9}), namespace)
    assert await leases.acquire(1, 1.5, said) == []
    assert "INFEASIBLE for 1; no node can ever hold one" in said[0]
    assert await leases.total_slots() == 0


async def test_a_label_that_no_node_has_leaves_no_slots(namespace: str) -> None:
    here = {"ray.io/node-id": "!nowhere"}
    elsewhere = {"ray.io/node-id": "in(nowhere, anywhere)"}
    assert await RayLeases(LeaseSettings(label_selector=here), namespace).total_slots() == 4
    assert await RayLeases(LeaseSettings(label_selector=elsewhere), namespace).total_slots() == 0


def test_a_bundle_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"lease\.resources"):
        RayLeases(LeaseSettings(resources={"GPU": 0}), "any")


async def test_a_later_coordinator_finds_leases_and_since_when_they_are_held(
    leases: RayLeases, namespace: str
) -> None:
    granted = await leases.acquire(2, 10, FakeListener())
    found = await RayLeases(LeaseSettings(), namespace).existing()
    assert sorted(found, key=name_of) == sorted(granted, key=name_of)


async def test_another_jobs_waiting_actor_gets_a_released_bundle(
    leases: RayLeases, cluster: str, record_property: Any
) -> None:
    granted = await leases.acquire(4, 10, FakeListener())
    with other_job(cluster) as job:
        job.next_line()
        assert await leases.slots_of_others() == {granted[0].node_id: 0.0}
        removed_at = await leases.release(granted[0])
        started = await asyncio.to_thread(job.next_line)
        seconds = started["started_at"] - removed_at
        record_property("release_to_running_s", seconds)
        assert seconds < 10
        await wait_for_others(leases, 1.0)
    await wait_for_others(leases, 0.0)


async def test_our_leases_never_look_like_somebody_elses_slots(leases: RayLeases) -> None:
    """Around a grant and a removal, Ray's tables disagree for a tenth of a second."""
    readings = []
    for _ in range(5):
        granted = await leases.acquire(3, 10, FakeListener())
        until_s = time.monotonic() + 0.3
        while time.monotonic() < until_s:
            readings += (await leases.slots_of_others()).values()
        releases = asyncio.gather(*map(leases.release, granted))
        while not releases.done():
            readings += (await leases.slots_of_others()).values()
            await asyncio.sleep(0)
        readings += (await leases.slots_of_others()).values()
    assert len(readings) > 100
    assert set(readings) == {0.0}


def name_of(lease: Lease) -> str:
    return lease.name
