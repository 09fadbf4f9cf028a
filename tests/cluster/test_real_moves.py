"""Real engines over Ray, whose samples move between members that stay."""

import uuid
from collections.abc import Iterator

import pytest

from actors.ray_coordinator import launch, shutdown_runtime
from actors.rollout_api import SampleResult
from actors.settings import PlanningSettings
from tests.cluster.real_runtime import RealRuntime, assert_same, batch, settings

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

EAGER = "tests.cluster.eager_coordinator:EagerCoordinator"


@pytest.fixture(scope="module", params=["copy", "recompute"])
def real_runtime(request: pytest.FixtureRequest, cluster: str, model: str) -> Iterator[RealRuntime]:
    """Nobody leaves, so that whoever moves does so for the load's sake."""
    name = f"real-{uuid.uuid4().hex[:8]}"
    group = {"max_workers": 2, "min_workers": 2, "move_samples_by": request.param}
    planning = PlanningSettings(rebalance=True, rebalance_steps=4)
    chosen = settings(name, model, **group).model_copy(update={"planning": planning})
    client = launch(chosen, coordinator=EAGER)
    try:
        yield RealRuntime(client, name, cluster)
    finally:
        shutdown_runtime(name)


async def test_samples_that_moved_between_members_equal_those_that_stayed(
    real_runtime: RealRuntime, reference: list[SampleResult]
) -> None:
    assert all(len(result.worker_ids) == 1 for result in reference), "a static rollout stays"
    results = await real_runtime.decode(batch("moved"))
    assert_same(results, reference)
    assert sum(len(result.worker_ids) - 1 for result in results) >= 2
    assert await real_runtime.client.operations() == [], "nobody left for it"
