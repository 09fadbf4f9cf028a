"""Samples of leavers move with their KV, or without it, and never wait for it in vain."""

import asyncio

import pytest

from actors.coordinator import Coordinator
from placement.errors import WorkerLostError
from placement.membership import Phase
from tests.unit.coordinator_harness import (
    World,
    all_results,
    check_tokens,
    check_usage_adds_up,
    make_request,
    make_settings,
    started,
)
from tests.unit.virtual_time import run

TAIL = [5, 8, 10, 10, 12, 15, 20, 20, 25, 30, 30, 35, 40, 60, 100, 140]


def _moved(coordinator: Coordinator) -> dict[tuple[str, str], float]:
    """(by, reason) -> samples, of the metric."""
    return {
        (sample.labels["by"], sample.labels["reason"]): sample.value
        for metric in coordinator._crew.telemetry.registry.collect()
        for sample in metric.samples
        if sample.name == "flexfloor_moved_samples_total" and sample.value
    }


async def _replay(world: World, coordinator: Coordinator) -> set[str]:
    """Decode the tail, check every token, and say who moved."""
    await coordinator.submit(make_request("r", TAIL))
    results = await all_results(coordinator, "r")
    check_tokens(results, TAIL)
    await check_usage_adds_up(coordinator, "r")
    return {result.sample_id for result in results if len(result.worker_ids) > 1}


@pytest.mark.parametrize("policy", ["copy", "auto"])
def test_moved_samples_come_with_the_kv_of_their_leaver(policy: str) -> None:
    async def main() -> None:
        world = World()
        async with started(world, make_settings(move_samples_by=policy)) as coordinator:
            moved = await _replay(world, coordinator)
            assert moved
            assert set(world.factory.copied) == moved
            assert not world.factory.unfetched, "a leaver went before its KV was fetched"
            reason = "configured" if policy == "copy" else "unmeasured"
            assert set(_moved(coordinator)) == {("copy", reason)}

    run(main())


def test_unless_asked_for_nothing_is_fetched() -> None:
    async def main() -> None:
        world = World()
        async with started(world, make_settings(move_samples_by="recompute")) as coordinator:
            assert await _replay(world, coordinator)
            assert not world.factory.copied
            assert set(_moved(coordinator)) == {("recompute", "configured")}

    run(main())


def test_a_leaver_that_dies_with_the_kv_costs_only_the_recomputation() -> None:
    async def main() -> None:
        world = World()
        for worker_id in range(4):
            world.factory.faults[worker_id, "fetch_kv"] = WorkerLostError("killed")
        async with started(world, make_settings(move_samples_by="copy")) as coordinator:
            moved = await _replay(world, coordinator)
            assert moved
            assert not world.factory.copied
            assert set(_moved(coordinator)) == {("recompute", "no_kv")}
            assert {op.phase for op in await coordinator.operations()} == {Phase.DONE}

    run(main())


def test_kv_that_does_not_come_is_given_up_and_the_leaver_goes() -> None:
    async def main() -> None:
        world = World()
        world.factory.fetch_s = 10_000.0
        settings = make_settings(move_samples_by="copy")
        async with started(world, settings) as coordinator:
            started_at = asyncio.get_running_loop().time()
            moved = await _replay(world, coordinator)
            assert moved
            assert moved <= world.factory.unfetched
            assert not world.factory.copied
            took_s = asyncio.get_running_loop().time() - started_at
            num_changes = len(await coordinator.operations())
            decoding_s = max(TAIL) * 0.05
            assert took_s < decoding_s + num_changes * (2 * settings.group.leave_timeout_s + 2)

    run(main())
