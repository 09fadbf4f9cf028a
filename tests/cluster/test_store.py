"""The store actor and its reaper."""

import asyncio
import subprocess
import sys
import time

import psutil
import pytest

from actors.ports import GroupRecord
from actors.protocol import BuildReport
from actors.ray_leases import RayLeases
from actors.ray_processes import kill_actor
from actors.ray_store import RayGroupStore, start_store
from actors.ray_tables import read_process
from actors.ray_teardown import STORE_NAME, find_actor
from actors.ray_worker_port import RayWorkerFactory
from actors.settings import GroupSettings, LeaseSettings
from placement.errors import UnavailableError
from placement.ids import Generation, WorkerId
from tests.cluster.fake_member import FACTS, make_spec

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(90)]

MEMBERS = (WorkerId(0), WorkerId(2))
RECORD = GroupRecord(
    next_worker_id=WorkerId(3),
    next_generation=Generation(2),
    generation=Generation(1),
    members=MEMBERS,
    owner_E=(WorkerId(0), WorkerId(0), WorkerId(2), WorkerId(2)),
    lease_names=("a", "b"),
    build_reports=tuple(BuildReport(w, FACTS, 64, {}) for w in MEMBERS),
)

MEET_IN_STORE = """
import sys
from datetime import timedelta
from torch.distributed import PrefixStore, TCPStore
store = TCPStore(sys.argv[1], int(sys.argv[2]), None, False, timedelta(seconds=20))
for generation in (1, 12):
    PrefixStore(f"g{generation}/", store).set("rank0", "here")
PrefixStore("g1/", store).get("rank0")
"""

ARE_KEYS_THERE = """
import sys
from datetime import timedelta
from torch.distributed import PrefixStore, TCPStore
store = TCPStore(sys.argv[1], int(sys.argv[2]), None, False, timedelta(seconds=20))
print([PrefixStore(f"g{g}/", store).check(["rank0"]) for g in (1, 12)])
"""


@pytest.fixture
def store(namespace: str) -> RayGroupStore:
    return start_store(namespace, reaper_timeout_s=60)


async def run_elsewhere(script: str, address: tuple[str, int]) -> str:
    """Run a script in a process that knows nothing but the store's address."""
    command = [sys.executable, "-c", script, address[0], str(address[1])]
    answer = await asyncio.to_thread(
        subprocess.run, command, check=True, capture_output=True, text=True, timeout=60
    )
    return answer.stdout.strip()


async def test_members_meet_in_the_store_and_a_forgotten_generation_leaves_no_keys(
    store: RayGroupStore,
) -> None:
    address = await store.address()
    await run_elsewhere(MEET_IN_STORE, address)
    assert await run_elsewhere(ARE_KEYS_THERE, address) == "[True, True]"
    await store.forget_generation(Generation(1))
    assert await run_elsewhere(ARE_KEYS_THERE, address) == "[False, True]"


async def test_the_store_remembers_the_last_record_for_the_next_coordinator(
    store: RayGroupStore, namespace: str
) -> None:
    assert await store.load() is None
    await store.record(RECORD)
    again = start_store(namespace, reaper_timeout_s=60)
    assert await again.load() == RECORD
    assert await again.address() == await store.address()


async def test_a_dead_store_is_unavailable_and_says_so(
    store: RayGroupStore, namespace: str
) -> None:
    await store.heartbeat()
    handle = find_actor(STORE_NAME, namespace)
    await asyncio.to_thread(kill_actor, handle, 10)
    with pytest.raises(UnavailableError, match="the store actor ended before it answered"):
        await store.heartbeat()


async def test_only_a_store_that_has_gone_is_renewed_and_then_by_an_empty_one(
    store: RayGroupStore, namespace: str
) -> None:
    await store.record(RECORD)
    assert not await store.renew()
    assert await store.load() == RECORD
    before = await store.address()
    await asyncio.to_thread(kill_actor, find_actor(STORE_NAME, namespace), 10)
    assert await store.renew()
    assert await store.load() is None
    assert await store.address() != before


async def beat(store: RayGroupStore) -> None:
    while True:
        await store.heartbeat()
        await asyncio.sleep(0.3)


async def test_when_heartbeats_stop_workers_and_leases_end_and_then_the_store(
    namespace: str,
) -> None:
    store = start_store(namespace, reaper_timeout_s=3)
    coordinator = asyncio.create_task(beat(store))
    leases = RayLeases(LeaseSettings(), namespace)
    factory = RayWorkerFactory(GroupSettings(), namespace, "tests.cluster.fake_member:FakeMember")
    pids = []
    for number, lease in enumerate(await leases.acquire(2, 10, print)):
        worker = await factory.spawn(WorkerId(number), lease)
        pids.append((await worker.build(make_spec(number))).pid)
    store_process = read_process(find_actor(STORE_NAME, namespace))
    assert store_process is not None

    await asyncio.sleep(4)  # more than the reaper's bound: heartbeats hold it off
    assert all(map(psutil.pid_exists, pids))
    assert len(await leases.existing()) == 2

    coordinator.cancel()
    stopped_s = time.monotonic()
    async with asyncio.timeout(30):
        while psutil.pid_exists(store_process.pid):
            await asyncio.sleep(0.05)
    assert 2.5 < time.monotonic() - stopped_s < 30
    assert not any(map(psutil.pid_exists, pids))
    assert await leases.existing() == []
    assert find_actor(STORE_NAME, namespace) is None
