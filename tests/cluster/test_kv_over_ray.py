"""KV goes from worker to worker as an object of Ray's, whoever has ended meanwhile."""

import pytest

from actors.ray_leases import RayLeases
from actors.ray_worker_port import RayWorkerFactory
from actors.settings import GroupSettings, LeaseSettings
from placement.errors import WorkerLostError
from placement.ids import SampleId, WorkerId
from placement.samples import Sample, Sampling
from tests.cluster.fake_member import make_spec

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(90)]

SETTINGS = GroupSettings(build_timeout_s=30, leave_timeout_s=5)
FAKE = "tests.cluster.fake_member:FakeMember"
KV_BYTES = 1 << 20


async def test_fetched_kv_outlives_the_worker_that_had_it(namespace: str) -> None:
    leases = RayLeases(LeaseSettings(), namespace)
    factory = RayWorkerFactory(SETTINGS, namespace, FAKE)
    workers = []
    for number, lease in enumerate(await leases.acquire(2, 10, print)):
        worker = await factory.spawn(WorkerId(number), lease)
        await worker.build(make_spec(number))
        workers.append(worker)
    leaver, stays = workers
    sample = Sample(SampleId("r/0/0"), (1, 2), Sampling(8), seed=1, generated_ids=(5, 6))
    kv = await leaver.fetch_kv([sample.sample_id])
    assert (kv.sample_ids, kv.num_bytes) == ((sample.sample_id,), KV_BYTES)
    await leaver.leave()
    await stays.submit([sample], kv)
    assert (await stays.collect(0, 0.0)).stats.copied_kv_bytes == KV_BYTES
    with pytest.raises(WorkerLostError):
        await leaver.fetch_kv([sample.sample_id])
