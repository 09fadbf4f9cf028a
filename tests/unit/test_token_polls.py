"""Streams that wait for tokens share calls, and each gets what is its own."""

import asyncio

import pytest

from actors.rollout_api import RolloutRequest, SampleNews, TokenWish
from placement.errors import FlexFloorError, RequestError, UnavailableError, UnknownIdError
from placement.ids import RolloutId
from placement.samples import Sampling
from service.token_polls import TokenPolls
from tests.unit.coordinator_harness import World, all_results, make_request, started
from tests.unit.fake_coordinator import FakeCoordinator
from tests.unit.service_client import run_bounded
from tests.unit.virtual_time import run

NAMES = [RolloutId(f"r{number}") for number in range(5)]


async def five_rollouts() -> FakeCoordinator:
    coordinator = FakeCoordinator(auto_finish=False)
    for name in NAMES:
        await coordinator.submit(RolloutRequest(name, ((1,),), 1, (Sampling(8),), seed=0))
    return coordinator


def test_streams_that_wait_together_share_one_call() -> None:
    async def test() -> None:
        coordinator = await five_rollouts()
        polls = TokenPolls(coordinator, 5.0)
        waiting = [asyncio.create_task(polls.next_tokens(TokenWish(name, (0,)))) for name in NAMES]
        while not coordinator.token_calls:
            await asyncio.sleep(0.001)
        await coordinator.grow(NAMES[2], 1)
        answers = await asyncio.gather(*waiting)
        assert coordinator.token_calls == [5]
        assert [len(news) for news in answers] == [0, 0, 1, 0, 0]
        assert answers[2][0].token_ids == coordinator.response[:1]

    run_bounded(test())


def test_one_that_comes_later_is_not_kept_waiting_by_those_before() -> None:
    async def test() -> None:
        coordinator = await five_rollouts()
        polls = TokenPolls(coordinator, 5.0)
        first = asyncio.create_task(polls.next_tokens(TokenWish(NAMES[0], (0,))))
        while not coordinator.token_calls:
            await asyncio.sleep(0.001)
        coordinator.grown[NAMES[1]] = 1  # nobody is told
        assert len(await polls.next_tokens(TokenWish(NAMES[1], (0,)))) == 1
        assert not first.done()
        first.cancel()
        await asyncio.wait([first])
        await coordinator.grow(NAMES[0], 1)

    run_bounded(test())


def test_an_error_is_that_of_its_wish_and_a_lost_coordinator_that_of_all() -> None:
    class LostCoordinator(FakeCoordinator):
        async def tokens_of(
            self, wishes: tuple[TokenWish, ...], wait_s: float
        ) -> tuple[tuple[SampleNews, ...] | FlexFloorError | None, ...]:
            raise UnavailableError("it is being restarted")

    async def test() -> None:
        coordinator = await five_rollouts()
        await coordinator.grow(NAMES[0], 1)
        polls = TokenPolls(coordinator, 5.0)
        good, bad = await asyncio.gather(
            polls.next_tokens(TokenWish(NAMES[0], (0,))),
            polls.next_tokens(TokenWish(RolloutId("nobody"), (0,))),
            return_exceptions=True,
        )
        assert isinstance(bad, UnknownIdError)
        assert not isinstance(good, BaseException)
        assert len(good) == 1
        lost = TokenPolls(LostCoordinator(), 5.0)
        answers = await asyncio.gather(
            *(lost.next_tokens(TokenWish(name, (0,))) for name in NAMES), return_exceptions=True
        )
        assert all(isinstance(answer, UnavailableError) for answer in answers)

    run_bounded(test())


def test_the_coordinator_answers_many_in_one_call_and_misses_no_token() -> None:
    async def main() -> None:
        async with started(World()) as coordinator:
            names = [RolloutId(name) for name in ("a", "b", "c")]
            for name, length in zip(names, (20, 45, 70), strict=True):
                await coordinator.submit(make_request(name, [length]))
            heard: dict[RolloutId, list[int]] = {name: [] for name in names}
            open_names, calls = list(names), 0
            while open_names:
                wishes = tuple(TokenWish(name, (len(heard[name]),)) for name in open_names)
                told = await coordinator.tokens_of(wishes, 30.0)
                assert any(told), "it waits until there is something for somebody"
                calls += 1
                for name, news in zip(list(open_names), told, strict=True):
                    assert not isinstance(news, FlexFloorError)
                    for one in news or ():
                        assert one.start == len(heard[name])
                        heard[name] += one.token_ids
                        if one.finish_reason is not None:
                            open_names.remove(name)
            for name in names:
                (result,) = await all_results(coordinator, name)
                assert tuple(heard[name]) == result.token_ids
            assert calls < 150, "one call serves all three"

    run(main())


@pytest.mark.parametrize("known", [(), (0, 0), (-1,)])
def test_a_wrong_wish_is_answered_with_its_error_beside_right_ones(known: tuple[int, ...]) -> None:
    async def main() -> None:
        async with started(World()) as coordinator:
            await coordinator.submit(make_request("r", [5]))
            await all_results(coordinator, "r")
            right = TokenWish(RolloutId("r"), (0,))
            wrong = TokenWish(RolloutId("r"), known)
            unknown = TokenWish(RolloutId("x"), (0,))
            news, refused, missing = await coordinator.tokens_of((right, wrong, unknown), 1.0)
            assert isinstance(news, tuple)
            assert len(news[0].token_ids) == 5
            assert isinstance(refused, RequestError)
            assert isinstance(missing, UnknownIdError)

    run(main())
