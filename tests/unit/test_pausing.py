"""Pause, resume, sleep and wake of a group that is in the middle of something."""

import asyncio

import pytest

from actors.control_api import PauseMode, ServingState
from actors.coordinator import Coordinator
from actors.journal import MemoryJournal
from actors.rollout_api import CancelledBy
from placement.errors import RequestError, WorkerLostError
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
from tests.unit.fake_cluster import HOLD_S, expected_response
from tests.unit.virtual_time import run, until

LENGTHS = [40, 60, 80, 100] * 4
LONG_S = 100.0
BOUND_S = 60.0


async def tokens_of(coordinator: Coordinator, rollout_id: str) -> int:
    return (await coordinator.status(RolloutId(rollout_id))).response_tokens


async def decoding(coordinator: Coordinator, rollout_id: str, tokens: int = 32) -> None:
    async with asyncio.timeout(BOUND_S):
        while await tokens_of(coordinator, rollout_id) < tokens:
            await asyncio.sleep(0.05)


async def pause(coordinator: Coordinator, mode: PauseMode) -> None:
    status = await coordinator.pause(mode, BOUND_S)
    assert (status.state, status.mode) == (ServingState.PAUSED, mode), status


def test_what_is_kept_stands_still_and_goes_on_as_if_nothing_had_been() -> None:
    async def test() -> None:
        world = World()
        async with started(world) as coordinator:
            await coordinator.submit(make_request("r", LENGTHS))
            await decoding(coordinator, "r")
            await pause(coordinator, PauseMode.KEEP)
            await asyncio.sleep(1.0)  # what was made before is told by now
            before = await tokens_of(coordinator, "r")
            await coordinator.submit(make_request("later", [5]))
            await asyncio.sleep(LONG_S)
            assert await tokens_of(coordinator, "r") == before
            assert await tokens_of(coordinator, "later") == 0
            assert (await coordinator.status(RolloutId("r"))).num_running == len(LENGTHS)
            assert (await coordinator.status(RolloutId("later"))).waiting_for.endswith("paused")
            assert await coordinator.operations() == []
            assert (await coordinator.resume()).state is ServingState.SERVING
            check_tokens(await all_results(coordinator, "r"), LENGTHS)
            check_tokens(await all_results(coordinator, "later"), [5])
            await check_usage_adds_up(coordinator, "r")

    run(test())


def test_whoever_is_aborted_gets_what_there_is_and_what_comes_later_waits() -> None:
    async def test() -> None:
        async with started(World(), make_settings(max_samples_per_worker=2)) as coordinator:
            request = make_request("r", LENGTHS)
            await coordinator.submit(request)
            await decoding(coordinator, "r")
            client = asyncio.create_task(all_results(coordinator, "r"))
            await pause(coordinator, PauseMode.ABORT)
            results = await asyncio.wait_for(client, BOUND_S)
            assert len(results) == len(LENGTHS)
            assert {result.finish_reason for result in results} == {FinishReason.ABORT}
            assert {result.cancelled_by for result in results} == {CancelledBy.SERVICE}
            assert any(result.token_ids for result in results)
            assert any(not result.token_ids for result in results), "none of them had waited"
            for result in results:
                expected = expected_response(result.seed, 3, len(result.token_ids))
                assert result.token_ids == expected
                assert len(result.logprobs) == len(result.token_ids)
            await coordinator.submit(make_request("later", [5]))
            await asyncio.sleep(LONG_S)
            assert await tokens_of(coordinator, "later") == 0
            await coordinator.resume()
            check_tokens(await all_results(coordinator, "later"), [5])

    run(test())


def test_what_has_begun_is_finished_first_and_nothing_else_begins() -> None:
    async def test() -> None:
        async with started(World(), make_settings(max_samples_per_worker=2)) as coordinator:
            await coordinator.submit(make_request("r", LENGTHS))
            await decoding(coordinator, "r")
            begun = (await coordinator.status(RolloutId("r"))).num_running
            assert begun == 8
            assert (await coordinator.pause(PauseMode.WAIT)).state is ServingState.PAUSING
            await pause(coordinator, PauseMode.WAIT)
            status = await coordinator.status(RolloutId("r"))
            assert (status.num_ended, status.num_running) == (begun, 0)
            await asyncio.sleep(LONG_S)
            assert (await coordinator.status(RolloutId("r"))).num_ended == begun
            await coordinator.resume()
            check_tokens(await all_results(coordinator, "r"), LENGTHS)

    run(test())


@pytest.mark.parametrize("second", [PauseMode.ABORT, PauseMode.WAIT])
def test_one_mode_follows_another(second: PauseMode) -> None:
    async def test() -> None:
        async with started(World()) as coordinator:
            await coordinator.submit(make_request("r", LENGTHS))
            await decoding(coordinator, "r")
            await pause(coordinator, PauseMode.KEEP)
            await pause(coordinator, PauseMode.KEEP)
            await pause(coordinator, second)
            ended = FinishReason.ABORT if second is PauseMode.ABORT else FinishReason.STOP
            async with asyncio.timeout(1.0):  # all of it is there already
                results = await all_results(coordinator, "r")
            assert {result.finish_reason for result in results} == {ended}
            await coordinator.resume()
            await coordinator.resume()
            await coordinator.submit(make_request("later", [5]))
            check_tokens(await all_results(coordinator, "later"), [5])

    run(test())


def test_a_pause_that_is_taken_back_while_it_begins_holds_nobody() -> None:
    async def test() -> None:
        async with started(World()) as coordinator:
            await coordinator.submit(make_request("r", LENGTHS))
            await decoding(coordinator, "r")
            for parts in range(8):  # before, while and after its members are held
                await coordinator.pause(PauseMode.KEEP)
                await asyncio.sleep(parts * HOLD_S / 4)
                await coordinator.resume()
                await decoding(coordinator, "r", await tokens_of(coordinator, "r") + 16)
            check_tokens(await all_results(coordinator, "r"), LENGTHS)

    run(test())


@pytest.mark.parametrize("mode", list(PauseMode))
def test_a_change_in_flight_ends_first_and_none_begins(mode: PauseMode) -> None:
    async def test() -> None:
        async with started(World()) as coordinator:
            tail = [5] * 14 + [120, 140]
            await coordinator.submit(make_request("r", tail))
            async with asyncio.timeout(BOUND_S):
                while not await coordinator.operations():
                    await asyncio.sleep(0.05)
            (change,) = await coordinator.operations()
            assert change.ended_at is None
            await pause(coordinator, mode)
            (change,) = await coordinator.operations()
            assert change.ended_at is not None
            await asyncio.sleep(LONG_S)
            assert len(await coordinator.operations()) == 1
            await coordinator.resume()
            results = await all_results(coordinator, "r")
            if mode is not PauseMode.ABORT:
                check_tokens(results, tail)

    run(test())


def test_a_group_that_is_lost_while_paused_is_founded_again_and_stays_paused() -> None:
    async def test() -> None:
        world = World()
        async with started(world) as coordinator:
            await coordinator.submit(make_request("r", LENGTHS))
            await decoding(coordinator, "r")
            await pause(coordinator, PauseMode.KEEP)
            first = world.factory.members
            world.factory.workers[first[1]].die()
            await until(lambda: bool(world.factory.members) and world.factory.members != first, "")
            before = await tokens_of(coordinator, "r")
            await asyncio.sleep(LONG_S)
            assert await tokens_of(coordinator, "r") == before
            assert (await coordinator.pause_status()).state is ServingState.PAUSED
            assert all(world.factory.workers[w].held for w in world.factory.members)
            await coordinator.resume()
            check_tokens(await all_results(coordinator, "r"), LENGTHS)

    run(test())


def test_a_member_that_cannot_be_held_is_lost_and_the_pause_comes_with_the_next_group() -> None:
    async def test() -> None:
        world = World()
        async with started(world) as coordinator:
            await coordinator.submit(make_request("r", LENGTHS))
            await decoding(coordinator, "r")
            world.factory.faults[2, "hold"] = WorkerLostError("the process was killed")
            await pause(coordinator, PauseMode.KEEP)
            assert not world.factory.faults
            await coordinator.resume()
            check_tokens(await all_results(coordinator, "r"), LENGTHS)

    run(test())


@pytest.mark.parametrize("mode", list(PauseMode))
def test_asleep_every_lease_has_gone_back_and_awake_all_goes_on(mode: PauseMode) -> None:
    async def test() -> None:
        world = World()
        async with started(world) as coordinator:
            await coordinator.submit(make_request("r", LENGTHS))
            await decoding(coordinator, "r")
            status = await coordinator.sleep(mode, BOUND_S)
            assert (status.state, status.mode) == (ServingState.ASLEEP, mode)
            assert world.is_clean()
            await coordinator.submit(make_request("later", [5]))
            await asyncio.sleep(LONG_S)
            assert world.is_clean(), "work that came woke the group"
            status = await coordinator.wake(BOUND_S)
            assert status.state is ServingState.SERVING
            assert len(world.factory.members) == 4
            results = await all_results(coordinator, "r")
            if mode is PauseMode.ABORT:
                assert {result.finish_reason for result in results} == {FinishReason.ABORT}
            else:
                check_tokens(results, LENGTHS)
            check_tokens(await all_results(coordinator, "later"), [5])
            await check_usage_adds_up(coordinator, "r")
            usage = (await coordinator.status(RolloutId("r"))).usage
            # Half of the four slots' time is the other rollout's, which had no tokens then either.
            freed_s = 4 * LONG_S / 2 if mode is PauseMode.KEEP else 0.0
            assert usage.freed_worker_s == pytest.approx(freed_s, abs=2.0)

    run(test())


def test_a_group_that_is_lost_on_its_way_to_sleep_finishes_in_another_one_what_is_waited_for() -> (
    None
):
    async def test() -> None:
        world = World()
        async with started(world) as coordinator:
            await coordinator.submit(make_request("r", LENGTHS))
            await decoding(coordinator, "r")
            await coordinator.sleep(PauseMode.WAIT)
            world.factory.workers[world.factory.members[1]].die()
            status = await coordinator.pause_status(5 * BOUND_S)
            assert status.state is ServingState.ASLEEP
            assert world.is_clean()
            check_tokens(await all_results(coordinator, "r"), LENGTHS)

    run(test())


def test_a_group_that_is_lost_on_its_way_to_sleep_is_not_founded_for_what_is_kept() -> None:
    async def test() -> None:
        world = World()
        async with started(world) as coordinator:
            await coordinator.submit(make_request("r", LENGTHS))
            await decoding(coordinator, "r")
            world.factory.workers[world.factory.members[1]].die()
            status = await coordinator.sleep(PauseMode.KEEP, BOUND_S)
            assert status.state is ServingState.ASLEEP
            assert world.leases.acquired == 4
            await coordinator.wake(BOUND_S)
            check_tokens(await all_results(coordinator, "r"), LENGTHS)

    run(test())


def test_a_group_that_wakes_may_stay_paused_until_it_is_resumed() -> None:
    async def test() -> None:
        world = World()
        async with started(world) as coordinator:
            await coordinator.sleep(wait_s=BOUND_S)
            await coordinator.submit(make_request("r", [5]))
            assert (await coordinator.wake()).state is ServingState.WAKING
            status = await coordinator.sleep(PauseMode.KEEP, BOUND_S)
            assert status.state is ServingState.ASLEEP
            status = await coordinator.wake(BOUND_S, stay_paused=True)
            assert status.state is ServingState.PAUSED
            assert len(world.factory.members) == 4
            await asyncio.sleep(LONG_S)
            assert await tokens_of(coordinator, "r") == 0
            assert (await coordinator.wake(BOUND_S)).state is ServingState.SERVING
            check_tokens(await all_results(coordinator, "r"), [5])

    run(test())


def test_a_group_that_cannot_be_woken_is_asleep_as_before_and_says_why() -> None:
    async def test() -> None:
        world = World()
        async with started(world, make_settings(acquire_timeout_s=5)) as coordinator:
            await coordinator.sleep(wait_s=BOUND_S)
            await coordinator.submit(make_request("r", [5]))
            world.leases.borrow("a", 4)
            status = await coordinator.wake(10 * BOUND_S)
            assert status.state is ServingState.ASLEEP
            assert "lease" in status.error
            assert world.is_clean()
            assert (await coordinator.status(RolloutId("r"))).num_ended == 0, "its sample waits"
            world.leases.borrow("a", -4)
            status = await coordinator.wake(BOUND_S)
            assert (status.state, status.error) == (ServingState.SERVING, "")
            check_tokens(await all_results(coordinator, "r"), [5])

    run(test())


def test_a_group_that_is_asleep_can_only_be_woken() -> None:
    async def test() -> None:
        async with started(World()) as coordinator:
            await coordinator.sleep(wait_s=BOUND_S)
            with pytest.raises(RequestError, match="wake"):
                await coordinator.resume()
            await coordinator.submit(make_request("r", [5]))
            status = await coordinator.pause(PauseMode.ABORT, BOUND_S)
            assert status.state is ServingState.ASLEEP
            (result,) = await all_results(coordinator, "r")
            assert result.finish_reason is FinishReason.ABORT

    run(test())


def test_standing_still_is_healthy_and_so_is_the_moment_after() -> None:
    async def test() -> None:
        async with started(World()) as coordinator:
            await coordinator.submit(make_request("r", LENGTHS))
            await decoding(coordinator, "r")
            for _ in range(2):
                await pause(coordinator, PauseMode.KEEP)
                await asyncio.sleep(LONG_S)
                health = await coordinator.health()
                assert health.healthy
                assert health.detail.startswith("paused; 16 samples")
                await coordinator.resume()
                assert (await coordinator.health()).healthy
                await asyncio.sleep(0.5)
            await coordinator.sleep(PauseMode.KEEP, BOUND_S)
            await asyncio.sleep(LONG_S)
            assert (await coordinator.health()).detail.startswith("asleep; 16 samples")
            assert (await coordinator.health()).healthy

    run(test())


@pytest.mark.parametrize("asleep", [False, True])
def test_a_coordinator_that_comes_back_stands_still_as_the_one_before(asleep: bool) -> None:
    async def test() -> None:
        world, journal = World(), MemoryJournal()
        first = world.coordinator(journal=journal)
        await first.start()
        await first.submit(make_request("r", LENGTHS))
        await decoding(first, "r")
        if asleep:
            await first.sleep(PauseMode.KEEP, BOUND_S)
        else:
            await pause(first, PauseMode.KEEP)
        await world.coordinator_dies()
        async with started(world, journal=journal) as second:
            expected = ServingState.ASLEEP if asleep else ServingState.PAUSED
            assert (await second.pause_status(BOUND_S)).state is expected
            before = await tokens_of(second, "r")
            await asyncio.sleep(LONG_S)
            assert await tokens_of(second, "r") == before
            assert world.is_clean() == asleep
            status = await (second.wake(BOUND_S) if asleep else second.resume())
            assert status.state is ServingState.SERVING
            check_tokens(await all_results(second, "r"), LENGTHS)

    run(test())


def test_another_store_knows_of_the_sleep_too() -> None:
    async def test() -> None:
        world, journal = World(), MemoryJournal()
        first = world.coordinator(journal=journal)
        await first.start()
        await first.sleep(wait_s=BOUND_S)
        world.store.alive = False
        await until(lambda: world.store.renewed == 1, "another store")
        await asyncio.sleep(1.0)
        await world.coordinator_dies()
        async with started(world, journal=journal) as second:
            assert (await second.pause_status(BOUND_S)).state is ServingState.ASLEEP
            assert world.is_clean()
            assert (await second.wake(BOUND_S)).state is ServingState.SERVING

    run(test())


def test_an_idle_group_that_the_policy_ended_is_not_founded_for_a_pause() -> None:
    async def test() -> None:
        world = World()
        async with started(world, make_settings(idle_workers="none")) as coordinator:
            await coordinator.submit(make_request("r", [5]))
            await all_results(coordinator, "r")
            await until(world.is_clean, "nobody stays")
            await pause(coordinator, PauseMode.KEEP)
            await coordinator.submit(make_request("later", [5]))
            await asyncio.sleep(LONG_S)
            assert world.is_clean()
            await coordinator.resume()
            check_tokens(await all_results(coordinator, "later"), [5])

    run(test())


def test_growth_that_is_awaited_is_given_up_for_a_pause() -> None:
    async def test() -> None:
        world = World(2)
        async with started(world) as coordinator:
            await coordinator.submit(make_request("r", LENGTHS))
            await decoding(coordinator, "r")
            await pause(coordinator, PauseMode.KEEP)
            world.leases.slots["a"] = 4
            world.leases.borrow("a", 0)  # tells that there is room now
            await asyncio.sleep(LONG_S)
            assert len(world.leases.leases) == 2
            await coordinator.resume()
            check_tokens(await all_results(coordinator, "r"), LENGTHS)
            await until(lambda: len(world.factory.members) == 4, "the group has grown")

    run(test())


def test_kept_kv_is_said_not_to_be_reset_or_is_computed_anew() -> None:
    async def test() -> None:
        async with started(World()) as coordinator:
            assert await coordinator.reset_prefix_cache()
            await coordinator.submit(make_request("r", LENGTHS))
            await decoding(coordinator, "r")
            assert not await coordinator.reset_prefix_cache()
            assert await coordinator.reset_prefix_cache(running=True)
            check_tokens(await all_results(coordinator, "r"), LENGTHS)
            assert await coordinator.reset_prefix_cache()

    run(test())


def test_the_store_knows_what_was_asked_of_the_group() -> None:
    async def test() -> None:
        world = World()
        async with started(world) as coordinator:
            await coordinator.sleep(wait_s=BOUND_S)
            assert world.store.last is not None
            assert (world.store.last.pause_mode, world.store.last.asleep) == (PauseMode.ABORT, True)
            await coordinator.wake(BOUND_S)
            assert (world.store.last.pause_mode, world.store.last.asleep) == (None, False)

    run(test())
