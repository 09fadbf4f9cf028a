"""Growth, idle policies and a coordinator that comes back."""

import asyncio

from actors.journal import MemoryJournal
from actors.rollout_api import Strategy
from placement.ids import RolloutId
from placement.samples import FinishReason
from tests.unit.coordinator_harness import (
    World,
    all_results,
    check_tokens,
    check_usage_adds_up,
    make_request,
    make_settings,
    started,
)
from tests.unit.virtual_time import run, until

TAIL = [5, 8, 10, 10, 12, 15, 20, 20, 25, 30, 30, 35, 40, 60, 100, 140]


def test_the_group_starts_with_the_leases_that_came_and_the_rest_joins() -> None:
    async def main() -> None:
        world = World()
        world.leases.borrow("a", 2)
        async with started(world) as coordinator:
            assert world.factory.members == (0, 1)
            await coordinator.submit(make_request("r", [140] * 24))
            await asyncio.sleep(1.0)
            status = await coordinator.status(RolloutId("r"))
            assert "NO_RESOURCES" in status.waiting_for
            assert status.num_queued == 16
            world.leases.borrow("a", -2)
            results = await all_results(coordinator, "r")
            check_tokens(results, [140] * 24)
            assert {w for result in results for w in result.worker_ids} == {0, 1, 2, 3}
            await check_usage_adds_up(coordinator, "r")
            usage = (await coordinator.status(RolloutId("r"))).usage
            assert usage.peak_slots == 4
            assert usage.not_yet_leased_worker_s > 0
            growth = (await coordinator.operations())[0]
            assert growth.old_members == (0, 1)
            assert growth.new_members == (0, 1, 2, 3)
            assert growth.phases_s["build.engine"] == 5.0

    run(main())


def test_when_fewer_leases_arrive_than_wanted_the_group_grows_by_those() -> None:
    async def main() -> None:
        world = World()
        world.leases.borrow("a", 3)
        async with started(world) as coordinator:
            assert world.factory.members == (0,)
            await coordinator.submit(make_request("r", [100] * 16))
            world.leases.borrow("a", -1)
            check_tokens(await all_results(coordinator, "r"), [100] * 16)
            growth = (await coordinator.operations())[0]
            assert len(growth.new_members) == 2
            assert len(world.leases.leases) == 2

    run(main())


def test_a_released_group_grows_back_for_the_next_rollout() -> None:
    async def main() -> None:
        world = World()
        async with started(world, make_settings(idle_workers="floor")) as coordinator:
            await coordinator.submit(make_request("one", TAIL))
            check_tokens(await all_results(coordinator, "one"), TAIL)
            await until(lambda: len(world.leases.leases) == 1, "the floor")
            await coordinator.submit(make_request("two", [100] * 16))
            check_tokens(await all_results(coordinator, "two"), [100] * 16)
            widths = [len(op.new_members) for op in await coordinator.operations()]
            assert max(widths) == 4

    run(main())


def test_samples_that_come_during_a_release_fit_into_what_is_left_behind_it() -> None:
    async def main() -> None:
        world = World()
        async with started(world, make_settings(max_samples_per_worker=200)) as coordinator:
            await coordinator.submit(make_request("r", TAIL))
            while not await coordinator.operations():
                await asyncio.sleep(0.01)
            lengths = [50] * 400
            await coordinator.submit(make_request("many", lengths))
            check_tokens(await all_results(coordinator, "many"), lengths)
            check_tokens(await all_results(coordinator, "r"), TAIL)
            release = (await coordinator.operations())[0]
            assert len(release.new_members) == 1
            assert world.factory.peak_running > 16

    run(main())


def test_idle_workers_all_takes_everybody_back() -> None:
    async def main() -> None:
        world = World()
        async with started(world) as coordinator:
            await coordinator.submit(make_request("r", TAIL))
            await all_results(coordinator, "r")
            assert len(world.factory.members) < 4
            await until(lambda: len(world.factory.members) == 4, "all are back")
            await asyncio.sleep(60.0)
            health = await coordinator.health()
            assert (health.workers, health.wanted_workers) == (4, 4)

    run(main())


def test_idle_workers_none_gives_the_group_up_and_the_next_rollout_founds_a_new_one() -> None:
    async def main() -> None:
        world = World()
        async with started(world, make_settings(idle_workers="none")) as coordinator:
            await asyncio.sleep(10.0)
            assert len(world.leases.leases) == 4, "before any rollout the policy has no say"
            await coordinator.submit(make_request("one", TAIL))
            check_tokens(await all_results(coordinator, "one"), TAIL)
            await until(world.is_clean, "the group is given up")
            await coordinator.submit(make_request("two", TAIL))
            check_tokens(await all_results(coordinator, "two"), TAIL)
            await check_usage_adds_up(coordinator, "two")

    run(main())


def test_a_static_rollout_waits_until_the_group_is_as_wide_as_it_gets() -> None:
    async def main() -> None:
        world = World()
        world.leases.borrow("a", 1)
        async with started(world, make_settings(idle_workers="floor")) as coordinator:
            await coordinator.submit(make_request("r", [20] * 12, strategy=Strategy.STATIC))
            await asyncio.sleep(5.0)
            assert (await coordinator.status(RolloutId("r"))).num_queued == 12
            results = await all_results(coordinator, "r")
            assert [result.worker_ids[0] for result in results] == sorted([0, 1, 2] * 4)

    run(main())


def test_a_coordinator_that_comes_back_takes_over_living_workers_and_their_samples() -> None:
    async def main() -> None:
        world = World()
        journal = MemoryJournal()
        first = world.coordinator(journal=journal)
        await first.start()
        await first.submit(make_request("r", [100] * 16))
        await asyncio.sleep(1.5)
        await world.coordinator_dies()
        await asyncio.sleep(2.0)  # the workers go on meanwhile
        async with started(world, journal=journal) as second:
            assert world.factory.living() == [0, 1, 2, 3]
            results = await all_results(second, "r")
            check_tokens(results, [100] * 16)
            assert all(len(result.worker_ids) == 1 for result in results)

    run(main())


def test_samples_that_nobody_knows_any_more_are_cancelled() -> None:
    async def main() -> None:
        world = World()
        first = world.coordinator()
        await first.start()
        await first.submit(make_request("r", [140] * 16))
        await asyncio.sleep(1.0)
        await world.coordinator_dies()
        async with started(world) as second:
            await until(
                lambda: not any(worker.samples for worker in world.factory.workers.values()),
                "workers are free",
                bound_s=1.0,
            )
            await second.submit(make_request("r", TAIL))
            check_tokens(await all_results(second, "r"), TAIL)

    run(main())


def test_a_group_of_which_a_worker_died_meanwhile_is_begun_afresh() -> None:
    async def main() -> None:
        world = World()
        journal = MemoryJournal()
        first = world.coordinator(journal=journal)
        await first.start()
        await first.submit(make_request("r", [60] * 16))
        await asyncio.sleep(1.0)
        await world.coordinator_dies()
        world.factory.workers[1].die()
        async with started(world, journal=journal) as second:
            assert world.factory.living() == [4, 5, 6, 7]
            assert len(world.leases.leases) == 4
            results = await all_results(second, "r")
            check_tokens(results, [60] * 16)
            assert all(result.finish_reason is FinishReason.STOP for result in results)

    run(main())


def test_a_group_left_in_the_middle_of_a_change_is_begun_afresh() -> None:
    async def main() -> None:
        world = World()
        journal = MemoryJournal()
        first = world.coordinator(journal=journal)
        await first.start()
        await first.submit(make_request("r", TAIL))
        while not await first.operations():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        await world.coordinator_dies()
        async with started(world, journal=journal) as second:
            assert min(world.factory.living()) >= 4
            check_tokens(await all_results(second, "r"), TAIL)

    run(main())
