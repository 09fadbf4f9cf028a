"""Work between two decisions of the steering loop, and holding the members for several reasons."""

import asyncio

import pytest

from actors.holding import HoldReason
from actors.standstill import Standstill
from placement.errors import RequestError, UnavailableError
from tests.unit.coordinator_harness import World, all_results, check_tokens, make_request, started
from tests.unit.virtual_time import run


def test_work_gets_its_turn_and_its_caller_gets_its_result_or_its_error() -> None:
    async def scene() -> None:
        standstill = Standstill(lambda: None, asyncio.Lock())

        async def answer() -> int:
            return 7

        async def fail() -> int:
            raise RequestError("is wrong", field="version")

        first = asyncio.ensure_future(standstill.do(answer, 5.0))
        second = asyncio.ensure_future(standstill.do(fail, 5.0))
        await asyncio.sleep(0)
        await standstill.run()
        assert await first == 7
        with pytest.raises(RequestError):
            await second

    run(scene())


def test_work_whose_turn_does_not_come_is_not_done_later() -> None:
    async def scene() -> None:
        standstill = Standstill(lambda: None, asyncio.Lock())
        done: list[int] = []

        async def work() -> None:
            done.append(1)

        with pytest.raises(UnavailableError, match="did not come to rest within 3 s"):
            await standstill.do(work, 3.0)
        await standstill.run()
        assert not done

    run(scene())


def test_no_change_is_under_way_while_the_work_is_done_and_none_begins() -> None:
    async def scene() -> None:
        world = World()
        async with started(world) as coordinator:
            steering = coordinator._steering
            await coordinator.submit(make_request("r", [3, 3, 3, 3, 40, 100]))
            while steering.change is None:
                await asyncio.sleep(0.05)

            async def watch() -> list[bool]:
                seen = []
                for _ in range(40):
                    await asyncio.sleep(0.05)
                    seen.append(steering.change is not None)
                return seen

            assert not any(await steering.standstill.do(watch, 60.0))
            check_tokens(await all_results(coordinator, "r"), [3, 3, 3, 3, 40, 100])

    run(scene())


def test_members_decode_on_when_the_last_reason_has_gone() -> None:
    async def scene() -> None:
        world = World()
        async with started(world) as coordinator:
            holding = coordinator._steering.holding
            await holding.hold(HoldReason.PAUSED)
            await holding.hold(HoldReason.WEIGHTS)
            await holding.let_go(HoldReason.WEIGHTS)
            workers = [world.factory.workers[w] for w in world.factory.members]
            assert all(worker.held for worker in workers)
            await holding.let_go(HoldReason.PAUSED)
            assert not any(worker.held for worker in workers)

    run(scene())


def test_a_group_that_is_founded_while_somebody_holds_it_is_held() -> None:
    async def scene() -> None:
        world = World()
        async with started(world) as coordinator:
            await coordinator._steering.holding.hold(HoldReason.PAUSED)
            await coordinator.submit(make_request("r", [5, 5]))
            lost = world.factory.members
            world.factory.workers[lost[0]].die()
            while not world.factory.members or world.factory.members == lost:
                await asyncio.sleep(1)
            await asyncio.sleep(20)
            assert (await coordinator.status(make_request("r", [5, 5]).rollout_id)).num_ended == 0
            await coordinator._steering.holding.let_go(HoldReason.PAUSED)
            check_tokens(await all_results(coordinator, "r"), [5, 5])

    run(scene())
