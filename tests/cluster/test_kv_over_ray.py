"""KV goes from worker to worker as an object of Ray's, whoever has ended meanwhile."""

import pytest
import ray

from actors.ray_leases import RayLeases
from actors.ray_worker_port import RayWorker, RayWorkerFactory
from actors.sample_kv import FetchedKv
from actors.settings import GroupSettings, LeaseSettings
from placement.errors import WorkerLostError
from placement.ids import SampleId, WorkerId
from placement.samples import Sample, Sampling
from tests.cluster.fake_member import make_spec

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(90)]

SETTINGS = GroupSettings(build_timeout_s=30, leave_timeout_s=5)
FAKE = "tests.cluster.fake_member:FakeMember"
KV_BYTES = 1 << 20
MOVED = Sample(SampleId("r/0/0"), (1, 2), Sampling(8), seed=1, generated_ids=(5, 6))


async def _built(namespace: str, count: int) -> list[RayWorker]:
    factory = RayWorkerFactory(SETTINGS, namespace, FAKE)
    workers = []
    for number, lease in enumerate(
        await RayLeases(LeaseSettings(), namespace).acquire(count, 10, print)
    ):
        worker = await factory.spawn(WorkerId(number), lease)
        await worker.build(make_spec(number))
        workers.append(worker)
    return workers


async def test_fetched_kv_outlives_the_worker_that_had_it(namespace: str) -> None:
    leaver, stays = await _built(namespace, 2)
    kv = await leaver.fetch_kv([MOVED.sample_id])
    assert (kv.sample_ids, kv.num_bytes) == ((MOVED.sample_id,), KV_BYTES)
    await leaver.leave()
    await stays.submit([MOVED], kv)
    stats = (await stays.collect(0, 0.0)).stats
    assert (stats.running, stats.copied_kv_bytes) == (1, KV_BYTES)
    with pytest.raises(WorkerLostError):
        await leaver.fetch_kv([MOVED.sample_id])


async def test_a_sample_whose_kv_is_lost_on_the_way_arrives_without_it(namespace: str) -> None:
    (worker,) = await _built(namespace, 1)

    @ray.remote(num_cpus=0, max_retries=0)
    def lost() -> None:
        raise OSError("the object's node has gone")

    await worker.submit([MOVED], FetchedKv((MOVED.sample_id,), KV_BYTES, lost.remote()))
    stats = (await worker.collect(0, 0.0)).stats
    assert (stats.running, stats.copied_kv_bytes) == (1, 0)
