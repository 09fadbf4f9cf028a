"""Rollouts, borrowers, aborts and deaths at random moments: whatever happens, every accepted
sample ends once, no token is wrong, the time adds up and nothing stays leased."""

import asyncio
import logging
import random

import pytest

from actors.coordinator import Coordinator
from actors.rollout_api import Strategy
from actors.settings import PlanningSettings
from placement.errors import ExpertChecksumError, UnavailableError, WorkerLostError
from placement.ids import RolloutId
from placement.samples import FinishReason
from tests.unit.coordinator_harness import (
    World,
    all_results,
    check_usage_adds_up,
    make_request,
    make_settings,
    started,
)
from tests.unit.fake_cluster import expected_response
from tests.unit.virtual_time import run

CALLS = ["build", "start", "prepare", "switch", "cross", "finalize", "leave", "submit", "collect"]


async def one_rollout(coordinator: Coordinator, rng: random.Random, name: str) -> None:
    await asyncio.sleep(rng.uniform(0, 40))
    lengths = [min(150, int(rng.lognormvariate(3, 1)) + 1) for _ in range(rng.randint(1, 40))]
    strategy = rng.choice([Strategy.ELASTIC, Strategy.ELASTIC, Strategy.STATIC])
    await coordinator.submit(
        make_request(name, lengths, strategy=strategy, seed=rng.getrandbits(9))
    )
    if rng.random() < 0.2:
        await asyncio.sleep(rng.uniform(0, 10))
        await coordinator.abort(RolloutId(name))
    results = await all_results(coordinator, name)
    assert len(results) == len({result.sample_id for result in results}) == len(lengths)
    for result, length in zip(results, lengths, strict=True):
        assert result.token_ids == expected_response(result.seed, 3, len(result.token_ids))
        if result.finish_reason is FinishReason.STOP:
            assert len(result.token_ids) == length
        else:
            assert result.finish_reason in (FinishReason.ABORT, FinishReason.FAILED)
            assert result.error or result.finish_reason is FinishReason.ABORT
    await check_usage_adds_up(coordinator, name)


async def misfortunes(world: World, rng: random.Random) -> None:
    borrowed = 0
    for _ in range(rng.randint(0, 12)):
        await asyncio.sleep(rng.expovariate(0.3))
        living = world.factory.living()
        what = rng.choice(["die", "fault", "fault", "damage", "borrow", "give back"])
        if what == "die" and living:
            world.factory.workers[rng.choice(living)].die()
        elif what == "fault":
            worker = rng.choice(living) if living else 0
            fault = (worker + rng.choice([0, 0, 4]), rng.choice(CALLS))
            world.factory.faults[fault] = WorkerLostError("killed")
        elif what == "damage" and living:
            world.factory.faults[rng.choice(living), "prepare"] = ExpertChecksumError("damaged")
        elif what == "borrow" and borrowed == 0 and world.leases.free():
            world.leases.borrow("a", 1)
            borrowed = 1
        elif what == "give back" and borrowed:
            world.leases.borrow("a", -1)
            borrowed = 0
    world.leases.borrow("a", -borrowed)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_every_sample_ends_once_and_nothing_is_left(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        rng = random.Random(seed)
        world = World()
        planning = PlanningSettings(
            policy="first_rule" if seed % 2 else "planner", unit="steps", replan_steps=4
        )
        settings = make_settings(idle_workers=rng.choice(["all", "floor", "none"]))
        settings = settings.model_copy(update={"planning": planning})
        async with started(world, settings) as coordinator:
            fate = asyncio.ensure_future(misfortunes(world, rng))
            await asyncio.gather(
                *(one_rollout(coordinator, rng, f"r{index}") for index in range(4))
            )
            await fate
            try:
                await one_rollout(coordinator, rng, "last")
            except UnavailableError:
                pytest.fail("the coordinator did not survive")

    run(main())
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
