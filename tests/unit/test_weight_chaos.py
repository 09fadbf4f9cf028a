"""New weights at random moments beside rollouts, deaths, borrowers and a keeper that ends: no step
with two versions (the fakes fail at one), no token lost, and a whole update always brings it back.
"""

import asyncio
import logging
import random

import pytest

from actors.control_api import DiskWeights, ObjectWeights, WeightUpdate
from actors.coordinator import Coordinator
from actors.settings import PlanningSettings
from placement.errors import (
    RequestError,
    UnavailableError,
    WeightUpdateError,
    WorkerLostError,
)
from tests.unit.coordinator_harness import (
    World,
    all_results,
    check_tokens,
    make_request,
    make_settings,
    started,
)
from tests.unit.test_coordinator_chaos import misfortunes, one_rollout
from tests.unit.virtual_time import run


def _mischief(world: World, rng: random.Random) -> None:
    """Something that goes wrong in the next update, or nothing."""
    living = world.factory.living()
    what = rng.choice(["nothing", "nothing", "a load", "a death", "a keeper"])
    if what == "a load" and living:
        world.factory.faults[rng.choice(living), "load_weights"] = WeightUpdateError("no tensor")
    elif what == "a death" and living:
        call = rng.choice(["hold", "load_weights", "unhold"])
        world.factory.faults[rng.choice(living), call] = WorkerLostError("killed")
    elif what == "a keeper":
        call = rng.choice(["stage", "commit", "drop", "kept"])
        world.keeper.faults[call] = UnavailableError("the keeper has ended")


async def _new_weights(world: World, coordinator: Coordinator, rng: random.Random) -> None:
    for number in range(rng.randint(2, 8)):
        await asyncio.sleep(rng.expovariate(0.2))
        _mischief(world, rng)
        before = (await coordinator.weight_status()).version
        version = f"step-{number}"
        source = DiskWeights(f"/{number}") if rng.random() < 0.3 else ObjectWeights(())
        try:
            status = await coordinator.update_weights(WeightUpdate(source, version))
        except (WeightUpdateError, UnavailableError, RequestError):
            status = await coordinator.weight_status()
            assert (status.version, status.failed_version) == (before, version)
        else:
            assert status.version == version


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_to_an_update_one_version_is_served(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        rng = random.Random(1000 + seed)
        world = World()
        policy = "first_rule" if seed % 2 else "planner"
        planning = PlanningSettings(policy=policy, unit="steps", replan_steps=4)
        settings = make_settings(idle_workers=rng.choice(["all", "floor", "none"]))
        settings = settings.model_copy(update={"planning": planning})
        async with started(world, settings) as coordinator:
            fate = asyncio.ensure_future(misfortunes(world, rng))
            weights = asyncio.ensure_future(_new_weights(world, coordinator, rng))
            await asyncio.gather(*(one_rollout(coordinator, rng, f"r{i}") for i in range(3)))
            await asyncio.gather(fate, weights)
            world.factory.faults.clear()
            world.keeper.faults.clear()
            await coordinator.update_weights(WeightUpdate(ObjectWeights(()), "last"))
            lengths = [5, 20, 60]
            await coordinator.submit(make_request("last", lengths))
            results = await all_results(coordinator, "last")
            check_tokens(results, lengths)
            assert {result.weight_versions for result in results} == {((0, "last"),)}

    run(main())
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert not [error for error in errors if "the full copy" not in error.getMessage()]
