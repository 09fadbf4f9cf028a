"""Pauses, sleeps and wakings at random moments, beside everything else that happens at random
moments: whatever a training loop asks for in whatever order, every sample ends once and right."""

import asyncio
import logging
import random

import pytest

from actors.control_api import PauseMode, ServingState
from actors.coordinator import Coordinator
from placement.errors import RequestError, WorkerLostError
from tests.unit.coordinator_harness import World, make_settings, started
from tests.unit.fake_cluster import HOLD_S, STEP_S
from tests.unit.test_coordinator_chaos import misfortunes, one_rollout
from tests.unit.virtual_time import run

LATEST_S = 600.0
WISHES = ["pause", "pause", "resume", "resume", "resume", "sleep", "wake", "wake", "stay paused"]


async def stands_still(coordinator: Coordinator) -> None:
    await asyncio.sleep(20 * STEP_S)  # what was made before is told by now
    before = {s.rollout_id: s.response_tokens for s in await coordinator.open_rollouts()}
    changes = len(await coordinator.operations())
    await asyncio.sleep(20 * STEP_S)
    for status in await coordinator.open_rollouts():  # those that came meanwhile have none
        assert status.response_tokens == before.get(status.rollout_id, 0)
    assert len(await coordinator.operations()) == changes


async def wishes(world: World, coordinator: Coordinator, rng: random.Random) -> None:
    """Some are awaited, others are overtaken by the next; at the end it serves."""
    for _ in range(rng.randint(10, 30)):
        await asyncio.sleep(rng.choice([0.0, HOLD_S / 2, HOLD_S, rng.expovariate(0.2)]))
        wait_s = rng.choice([0.0, 0.0, 1.0, 30.0])
        wish, mode = rng.choice(WISHES), rng.choice(list(PauseMode))
        if wish == "pause":
            status = await coordinator.pause(mode, wait_s)
            assert status.state is not ServingState.SERVING
            if status.state is ServingState.PAUSED:
                await stands_still(coordinator)
        elif wish == "sleep":
            status = await coordinator.sleep(mode, wait_s)
            assert status.state is not ServingState.SERVING
            if status.state is ServingState.ASLEEP:
                await stands_still(coordinator)
                assert not world.leases.leases
        elif wish == "wake":
            await coordinator.wake(wait_s)
        elif wish == "stay paused":
            await coordinator.wake(wait_s, stay_paused=True)
        else:
            try:
                await coordinator.resume()
            except RequestError:
                state = (await coordinator.pause_status()).state
                assert state in (ServingState.ASLEEP, ServingState.PAUSING)
    async with asyncio.timeout(LATEST_S):
        while (await coordinator.wake(60.0)).state is not ServingState.SERVING:
            await asyncio.sleep(1.0)  # its slots are lent to somebody, or a fault hit it


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_asked_for_every_sample_ends_once_and_nothing_is_left(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        rng = random.Random(seed)
        world = World()
        settings = make_settings(idle_workers=rng.choice(["all", "floor", "none"]))
        async with started(world, settings) as coordinator:
            unlucky = misfortunes(world, rng) if seed % 2 else asyncio.sleep(0)
            if seed % 2:
                fault = (rng.randrange(8), rng.choice(["hold", "unhold"]))
                world.factory.faults[fault] = WorkerLostError("killed")
            asked = asyncio.ensure_future(wishes(world, coordinator, rng))
            fate = asyncio.ensure_future(unlucky)
            await asyncio.gather(
                *(one_rollout(coordinator, rng, f"r{index}") for index in range(4)), asked, fate
            )
            await one_rollout(coordinator, rng, "last")

    run(main())
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
