"""Deaths in each phase: the rollout goes on, or ends with a reason, and nothing stays leased."""

import asyncio

import pytest

from actors.rollout_api import OperationStatus
from placement.errors import (
    ConfigError,
    ExpertChecksumError,
    FlexFloorError,
    LeaseTimeoutError,
    ModelRefusedError,
    UnavailableError,
    WorkerLostError,
)
from placement.ids import RolloutId
from placement.membership import Phase
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
from tests.unit.virtual_time import clock, run, until

TAIL = [5, 8, 10, 10, 12, 15, 20, 20, 25, 30, 30, 35, 40, 60, 100, 140]
DEAD = WorkerLostError("the process was killed")
DAMAGED = ExpertChecksumError("expert 3 arrived damaged")


async def shrink_with(fault: tuple[int, str], error: FlexFloorError) -> list[OperationStatus]:
    """A rollout during whose first release a fault happens; all its tokens are right."""
    world = World()
    async with started(world) as coordinator:
        world.factory.faults[fault] = error
        await coordinator.submit(make_request("r", TAIL))
        results = await all_results(coordinator, "r")
        check_tokens(results, TAIL)
        assert all(result.finish_reason is FinishReason.STOP for result in results)
        assert not world.factory.faults, "the fault never happened"
        await check_usage_adds_up(coordinator, "r")
        await until(lambda: len(world.factory.members) == 4, "the group is whole again")
        return await coordinator.operations()


@pytest.mark.parametrize("worker", [0, 1, 2, 3])
def test_a_damaged_expert_rolls_the_release_back_and_it_is_tried_again(worker: int) -> None:
    first, second, *_ = run(shrink_with((worker, "prepare"), DAMAGED))
    assert first.phase is Phase.ROLLED_BACK
    assert "damaged" in first.error
    assert second.phase is Phase.DONE
    assert second.generation > first.generation
    assert first.ended_at is not None
    assert second.started_at >= first.ended_at + 1.0, "it was tried again without a pause"


@pytest.mark.parametrize("worker", [0, 1, 2, 3])
@pytest.mark.parametrize("call", ["prepare", "switch", "cross"])
def test_a_member_that_dies_in_a_release_costs_no_token(worker: int, call: str) -> None:
    first, *_ = run(shrink_with((worker, call), DEAD))
    assert first.phase is Phase.ROLLED_BACK
    assert first.ended_at is not None


@pytest.mark.parametrize("worker", [0, 1, 2, 3])
def test_whoever_dies_while_finalizing_costs_no_token(worker: int) -> None:
    first, *_ = run(shrink_with((worker, "finalize"), DEAD))
    leaver = worker not in first.new_members
    assert first.phase is (Phase.DONE if leaver else Phase.FINALIZE)
    assert first.ended_at is not None
    assert bool(first.error) is not leaver


@pytest.mark.parametrize("worker", [0, 1, 2, 3])
def test_a_leaver_that_dies_when_it_is_no_longer_needed_does_not_stop_the_change(
    worker: int,
) -> None:
    first, *_ = run(shrink_with((worker, "crossed"), DEAD))
    leaver = worker not in first.new_members
    assert first.phase is (Phase.DONE if leaver else Phase.ROLLED_BACK)


def test_a_leaver_that_does_not_leave_is_killed() -> None:
    async def main() -> None:
        world = World()
        async with started(world) as coordinator:
            for worker in range(4):
                world.factory.faults[worker, "leave"] = DEAD
            await coordinator.submit(make_request("r", TAIL))
            check_tokens(await all_results(coordinator, "r"), TAIL)
            assert (await coordinator.operations())[0].phase is Phase.DONE

    run(main())


@pytest.mark.parametrize("call", ["submit", "collect"])
def test_a_worker_that_dies_while_decoding_costs_no_token(call: str) -> None:
    async def main() -> None:
        world = World()
        async with started(world) as coordinator:
            await coordinator.submit(make_request("r", [60] * 20))
            await asyncio.sleep(1.0)
            world.factory.faults[2, call] = DEAD
            results = await all_results(coordinator, "r")
            check_tokens(results, [60] * 20)
            assert {w for result in results for w in result.worker_ids} > {4}
            assert b"flexfloor_group_restarts_total 1.0" in await coordinator.metrics_text()

    run(main())


def test_a_group_that_is_lost_again_and_again_ends_its_rollouts_with_the_reason() -> None:
    async def main() -> None:
        world = World()
        async with started(world) as coordinator:
            for worker in range(0, 40, 4):
                world.factory.faults[worker, "submit"] = DEAD
            await coordinator.submit(make_request("r", [60] * 4))
            results = await all_results(coordinator, "r")
            assert {result.finish_reason for result in results} == {FinishReason.FAILED}
            assert "worker 8" in results[0].error
            await until(world.is_clean, "nothing is leased for a group that was given up")
            world.factory.faults.clear()
            await coordinator.submit(make_request("next", TAIL))
            check_tokens(await all_results(coordinator, "next"), TAIL)

    run(main())


@pytest.mark.parametrize("lengths", [[150] * 60, TAIL], ids=["heartbeat", "release"])
def test_a_store_that_dies_costs_the_group_and_no_token(lengths: list[int]) -> None:
    """A heartbeat misses it, or the next change of the group."""

    async def main() -> None:
        world = World()
        async with started(world) as coordinator:
            founders = set(world.factory.members)
            await coordinator.submit(make_request("r", lengths))
            await asyncio.sleep(0.2)
            world.store.alive = False
            check_tokens(await all_results(coordinator, "r"), lengths)
            assert world.store.renewed == 1
            await until(lambda: len(world.factory.members) == 4, "the group is whole again")
            assert not founders & set(world.factory.members)
            assert world.store.last is not None
            assert not founders & set(world.store.last.members)

    run(main())


def test_without_any_store_the_rollouts_end_with_the_reason_and_nothing_stays_leased() -> None:
    async def main() -> None:
        world = World()
        async with started(world) as coordinator:
            world.store.alive = world.store.renewable = False
            await coordinator.submit(make_request("r", TAIL))
            results = await all_results(coordinator, "r")
            unfinished = [r for r in results if r.finish_reason is FinishReason.FAILED]
            assert "no node for another store" in unfinished[-1].error
            await until(world.is_clean, "nothing is leased for a group that was given up")
            world.store.renewable = True
            await coordinator.submit(make_request("next", TAIL))
            check_tokens(await all_results(coordinator, "next"), TAIL)

    run(main())


@pytest.mark.parametrize("call", ["build", "prepare", "switch", "cross"])
def test_a_joiner_that_dies_costs_nothing(call: str) -> None:
    async def main() -> None:
        world = World()
        world.leases.borrow("a", 1)
        async with started(world) as coordinator:
            assert len(world.factory.members) == 3
            world.factory.faults[3, call] = DEAD
            await coordinator.submit(make_request("r", [140] * 20))
            world.leases.borrow("a", -1)
            results = await all_results(coordinator, "r")
            check_tokens(results, [140] * 20)
            assert all(len(result.worker_ids) == 1 for result in results[:12])
            first, *_ = await coordinator.operations()
            assert first.phase is Phase.ROLLED_BACK
            assert first.new_members == (0, 1, 2, 3)
            await until(lambda: len(world.factory.members) == 4, "the next try succeeds")
            assert 3 not in world.factory.members
            assert len(world.leases.leases) == 4

    run(main())


def test_growth_that_fails_every_time_is_given_up_until_there_is_new_work() -> None:
    async def main() -> None:
        world = World()
        world.leases.borrow("a", 1)
        async with started(world) as coordinator:
            for worker in range(3, 20):
                world.factory.faults[worker, "build"] = DEAD
            world.leases.borrow("a", -1)
            await asyncio.sleep(900)
            operations = await coordinator.operations()
            assert len(operations) == 5
            assert len(world.leases.leases) == 3
            await coordinator.submit(make_request("r", TAIL))
            check_tokens(await all_results(coordinator, "r"), TAIL)

    run(main())


@pytest.mark.parametrize("error", [ModelRefusedError("not a MoE"), ConfigError("bad option")])
def test_a_refused_model_ends_the_start_with_nothing_leased(error: FlexFloorError) -> None:
    async def main() -> None:
        world = World()
        world.factory.faults[2, "build"] = error
        with pytest.raises(type(error), match=error.message):
            await world.coordinator().start()
        assert world.is_clean()

    run(main())


def test_founders_that_are_too_few_to_hold_the_model_wait_for_more() -> None:
    async def main() -> None:
        world = World()
        world.leases.borrow("a", 3)
        world.factory.faults[0, "build"] = ConfigError(
            "16 experts leave no KV block", field="group.kv_memory_bytes"
        )
        coordinator = world.coordinator()
        starting = asyncio.ensure_future(coordinator.start())
        await asyncio.sleep(15.0)
        assert not starting.done()
        assert not world.factory.living(), "a group that cannot be is kept"
        world.leases.borrow("a", -1)
        await starting
        assert world.factory.members == (1, 2)
        await coordinator.shutdown()
        await world.factory.stop()

    run(main())


def test_a_start_without_capacity_says_what_it_waits_for_and_leases_nothing() -> None:
    async def main() -> None:
        world = World(slots=1)
        before = clock()
        coordinator = world.coordinator(make_settings(min_workers=2))
        with pytest.raises(LeaseTimeoutError, match=r"2 of 4 leases.*NO_RESOURCES"):
            await coordinator.start()
        assert clock() - before == pytest.approx(20, abs=1)
        assert world.is_clean()

    run(main())


@pytest.mark.parametrize("after_s", [0.05, 3.0, 5.5])
def test_shutdown_in_the_middle_of_a_start_leaves_nothing(after_s: float) -> None:
    async def main() -> None:
        world = World()
        coordinator = world.coordinator()
        starting = asyncio.ensure_future(coordinator.start())
        await asyncio.sleep(after_s)
        await coordinator.shutdown()
        outcome = (await asyncio.gather(starting, return_exceptions=True))[0]
        assert outcome is None or isinstance(outcome, UnavailableError)
        await world.factory.stop()
        assert world.is_clean()

    run(main())


@pytest.mark.parametrize("phase", [Phase.PREPARE, Phase.PAUSE, Phase.FINALIZE])
def test_shutdown_in_the_middle_of_a_change_leaves_nothing(phase: Phase) -> None:
    async def main() -> None:
        world = World()
        async with started(world) as coordinator:
            await coordinator.submit(make_request("r", TAIL))

            async def in_phase() -> bool:
                return any(op.phase == phase for op in await coordinator.operations())

            while not await in_phase():
                assert (await coordinator.status(RolloutId("r"))).num_ended < len(TAIL)
                await asyncio.sleep(0.005)
            await coordinator.shutdown()
            assert world.is_clean()

    run(main())


def test_a_member_that_never_crosses_over_brings_the_old_group_back() -> None:
    async def main() -> None:
        world = World()
        async with started(world) as coordinator:
            world.factory.deaf.add(2)
            await coordinator.submit(make_request("r", TAIL))
            results = await all_results(coordinator, "r")
            check_tokens(results, TAIL)
            first = (await coordinator.operations())[0]
            assert first.phase is Phase.ROLLED_BACK
            assert "did not cross over within 5.0 s" in first.error
            assert b"flexfloor_group_restarts_total 0.0" in await coordinator.metrics_text()

    run(main())
