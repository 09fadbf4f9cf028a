import asyncio
from collections.abc import Callable

import pytest

from placement.ids import RolloutId
from service.app import create_app
from tests.unit.fake_coordinator import FakeCoordinator
from tests.unit.service_client import SETTINGS, FakeTokenizer, LeavingClient, body, run_bounded

STEP_S = 0.01


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(STEP_S)


@pytest.mark.parametrize("stream", [True, False])
def test_a_rollout_ends_when_the_client_that_created_it_goes(stream: bool) -> None:
    async def test() -> None:
        coordinator = FakeCoordinator(auto_finish=False)
        app = create_app(coordinator, SETTINGS, FakeTokenizer())
        client = LeavingClient(app, body(id="a", n=2, stream=stream))
        await until(lambda: "a" in coordinator.requests)
        await client.leave()
        await until(lambda: coordinator.aborted == ["a"])

    run_bounded(test())


def test_samples_reach_the_client_as_they_end_and_no_sooner() -> None:
    async def test() -> None:
        coordinator = FakeCoordinator(auto_finish=False)
        app = create_app(coordinator, SETTINGS, FakeTokenizer())
        client = LeavingClient(app, body(id="a", n=2, stream=True))
        assert (await client.next_line())["type"] == "rollout"
        await coordinator.finish(RolloutId("a"), 1)
        assert (await client.next_line())["sample_id"] == "a/0/0"
        assert not client.request.done()
        await coordinator.finish(RolloutId("a"), 1)
        assert (await client.next_line())["sample_id"] == "a/0/1"
        assert (await client.next_line())["type"] == "summary"
        await client.request
        assert coordinator.aborted == []

    run_bounded(test())


def test_a_rollout_that_outlives_its_client_goes_on() -> None:
    async def test() -> None:
        coordinator = FakeCoordinator(auto_finish=False)
        app = create_app(coordinator, SETTINGS, FakeTokenizer())
        client = LeavingClient(app, body(id="a", stream=True, abort_on_disconnect=False))
        await client.next_line()
        await client.leave()
        await coordinator.finish(RolloutId("a"), 1)
        assert coordinator.aborted == []

    run_bounded(test())


def test_a_client_that_only_joined_ends_nothing() -> None:
    async def test() -> None:
        coordinator = FakeCoordinator(auto_finish=False)
        app = create_app(coordinator, SETTINGS, FakeTokenizer())
        creator = LeavingClient(app, body(id="a", seed=1, stream=True, abort_on_disconnect=False))
        await creator.next_line()
        await creator.leave()
        joiner = LeavingClient(app, body(id="a", seed=1, stream=True))
        await joiner.next_line()
        await joiner.leave()
        await coordinator.finish(RolloutId("a"), 1)
        assert coordinator.aborted == []

    run_bounded(test())


def test_a_retry_that_joins_before_the_first_client_goes_keeps_the_rollout_alive() -> None:
    async def test() -> None:
        coordinator = FakeCoordinator(auto_finish=False)
        app = create_app(coordinator, SETTINGS, FakeTokenizer())
        same = body(id="a", seed=1, stream=True)
        first, retry = LeavingClient(app, same), LeavingClient(app, same)
        await first.next_line()
        await retry.next_line()
        await first.leave()
        assert coordinator.aborted == []
        await retry.leave()
        await until(lambda: coordinator.aborted == ["a"])

    run_bounded(test())


def test_a_request_that_is_cancelled_ends_its_rollout() -> None:
    async def test() -> None:
        coordinator = FakeCoordinator(auto_finish=False)
        app = create_app(coordinator, SETTINGS, FakeTokenizer())
        client = LeavingClient(app, body(id="a"))
        await until(lambda: "a" in coordinator.requests)
        client.request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await client.request
        await until(lambda: coordinator.aborted == ["a"])

    run_bounded(test())
