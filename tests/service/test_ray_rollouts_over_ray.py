"""Rollouts without HTTP, from a driver of the same cluster to the coordinator's actor."""

import asyncio

import pytest
import ray

from actors.ray_coordinator import connect
from placement.errors import UnavailableError
from placement.ids import RolloutId
from service.ray_rollouts import RayRollouts
from service.schemas import SamplingBody
from tests.service.conftest import NAMESPACE

pytestmark = pytest.mark.timeout(180)

SAMPLING = SamplingBody(max_tokens=8)
LIMIT_S = 60.0


def test_samples_and_tokens_come_from_the_coordinators_actor(
    coordinator: ray.actor.ActorHandle,
) -> None:
    async def test() -> None:
        rollouts = RayRollouts(NAMESPACE)
        for name in ("samples", "tokens"):
            method = rollouts.stream if name == "samples" else rollouts.stream_tokens
            stream = method([[1, 2, 3]], SAMPLING, n=2, id=name)
            first = asyncio.ensure_future(anext(stream))
            async with asyncio.timeout(LIMIT_S):
                while name not in {r.rollout_id for r in await connect(NAMESPACE).open_rollouts()}:
                    await asyncio.sleep(0.05)
                await coordinator.finish.remote(RolloutId(name), 2)
                told = [await first, *[item async for item in stream]]
            assert [item.token_ids for item in told] == [(104, 105)] * 2

    asyncio.run(test())


def test_a_namespace_without_a_service_is_named(ray_cluster: None) -> None:
    with pytest.raises(UnavailableError, match="nobody-here"):
        RayRollouts("nobody-here")
