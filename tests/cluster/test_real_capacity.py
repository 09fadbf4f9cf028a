"""A cluster that others use too, and workers that host vLLM."""

import asyncio
import time
from typing import Any

import pytest

from actors.ray_coordinator import launch
from actors.rollout_api import RolloutStatus
from placement.ids import RolloutId
from placement.membership import Phase
from tests.cluster.real_runtime import (
    MAX_SAMPLES,
    NUM_WORKERS,
    REGROWTH_BOUND_S,
    RealRuntime,
    batch,
    settings,
    until,
)
from tests.cluster.started_job import other_job

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

MORE_THAN_TWO_CAN_TAKE = (900,) * (2 * MAX_SAMPLES + 4)


async def test_a_group_starts_with_the_slots_that_are_free_and_grows_when_others_return_theirs(
    cluster: str, namespace: str, model: str, record_property: Any
) -> None:
    with other_job(cluster, num_slots=2) as job:
        for _ in range(3):  # it waits, and then it has two slots
            await asyncio.to_thread(job.next_line)
        wanted = settings(namespace, model, min_workers=2)
        runtime = RealRuntime(await asyncio.to_thread(launch, wanted), namespace, cluster)
        assert len(await runtime.member_pids()) == 2
        await runtime.client.submit(batch("crowded", MORE_THAN_TWO_CAN_TAKE))

        async def waiting() -> RolloutStatus | None:
            status = await runtime.client.status(RolloutId("crowded"))
            return status if "2 held by others" in status.waiting_for else None

        status = await until(waiting, 30, "a status that says who holds the slots")
        assert status.num_running == 2 * MAX_SAMPLES
        assert status.num_queued == 4
        assert "0 free" in status.waiting_for
    returned_s = time.monotonic()

    async def all_running() -> bool:
        status = await runtime.client.status(RolloutId("crowded"))
        return status.num_running == len(MORE_THAN_TWO_CAN_TAKE)

    await until(all_running, REGROWTH_BOUND_S, "the queued samples on workers that joined")
    record_property("slots_free_to_all_running_s", time.monotonic() - returned_s)
    growth = (await runtime.client.operations())[-1]
    assert growth.phase in (Phase.FINALIZE, Phase.DONE)
    assert len(growth.new_members) > len(growth.old_members) == 2
    assert len(growth.new_members) <= NUM_WORKERS
    assert (await runtime.client.status(RolloutId("crowded"))).waiting_for == ""
    await runtime.client.abort(RolloutId("crowded"))
