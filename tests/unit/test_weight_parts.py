"""Parts of an update whose last one cannot be loaded."""

import pytest

from actors.control_api import ObjectWeights, WeightUpdate
from placement.errors import WeightUpdateError
from tests.unit.coordinator_harness import World, started
from tests.unit.virtual_time import run


def test_after_a_last_part_that_failed_there_are_no_parts_that_wait() -> None:
    async def test() -> None:
        world = World()
        async with started(world) as coordinator:
            nothing = ObjectWeights(())
            await coordinator.update_weights(WeightUpdate(nothing, "1", last=False))
            assert (await coordinator.weight_status()).parts_version == "1"
            world.factory.faults[2, "load_weights"] = WeightUpdateError("no memory")
            with pytest.raises(WeightUpdateError):
                await coordinator.update_weights(WeightUpdate(nothing, "1", first=False))
            status = await coordinator.weight_status()
            assert (status.version, status.parts_version) == ("0", "")
            assert status.failed_version == "1"

    run(test())
