"""Rollouts without HTTP: the same calls, straight to the coordinator."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from actors.control_api import ServingState
from placement.errors import RequestError, UnavailableError, UnknownIdError
from placement.ids import RolloutId
from service.client_calls import Patience
from service.ray_rollouts import PortRollouts
from service.schemas import SamplingBody
from tests.unit.fake_coordinator import FakeCoordinator
from tests.unit.service_client import LIMIT_S, SETTINGS, FakeTokenizer

SAMPLING = SamplingBody(max_tokens=8)
QUICK = Patience(attempts=3, first_pause_s=0.001, longest_pause_s=0.05)


def with_port(
    test: Callable[[PortRollouts, FakeCoordinator], Awaitable[None]], *, auto_finish: bool = True
) -> None:
    async def run() -> None:
        coordinator = FakeCoordinator(auto_finish=auto_finish)
        port = PortRollouts(
            coordinator, tokenizer=FakeTokenizer(), settings=SETTINGS, patience=QUICK
        )
        async with asyncio.timeout(LIMIT_S):
            await test(port, coordinator)

    asyncio.run(run())


def test_samples_come_as_they_end_and_the_whole_in_order() -> None:
    async def test(port: PortRollouts, coordinator: FakeCoordinator) -> None:
        result = await port.rollout(["hi", [1, 2]], SAMPLING, n=2)
        assert [s.sample_id.split("/", 1)[1] for s in result.samples] == [
            "0/0",
            "0/1",
            "1/0",
            "1/1",
        ]
        assert {sample.text for sample in result.samples} == {"hi"}
        assert await port.status(result.rollout.rollout_id) == result.rollout
        streamed = [sample async for sample in port.stream(["hi"], SAMPLING, n=5)]
        assert [sample.sample_index for sample in streamed] == [0, 1, 2, 3, 4]
        assert (await port.health()).healthy
        assert len(await port.workers()) == len(await port.operations()) == 1

    with_port(test)


def test_tokens_come_as_they_grow() -> None:
    async def test(port: PortRollouts, coordinator: FakeCoordinator) -> None:
        news = [item async for item in port.stream_tokens(["hi"], SAMPLING, n=2)]
        assert [(item.sample_index, item.token_ids) for item in news] == [
            (0, (104, 105)),
            (1, (104, 105)),
        ]
        assert all(item.finish_reason is not None for item in news)

    with_port(test)


def test_the_group_is_paused_put_to_sleep_and_given_new_weights() -> None:
    async def test(port: PortRollouts, coordinator: FakeCoordinator) -> None:
        assert (await port.pause()).state is ServingState.PAUSED
        assert (await port.resume()).state is ServingState.SERVING
        assert (await port.sleep()).state is ServingState.ASLEEP
        assert (await port.wake()).state is ServingState.SERVING
        assert (await port.update_weights("7", "/weights/7")).version == "7"
        assert (await port.weights()).version == "7"
        coordinator.wake_error = "no slot is free"
        await port.sleep()
        with pytest.raises(UnavailableError, match="no slot is free"):
            await port.wake()

    with_port(test)


def test_a_call_that_is_cancelled_ends_its_rollout() -> None:
    async def test(port: PortRollouts, coordinator: FakeCoordinator) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await port.rollout(["hi"], SAMPLING, id="a")
        assert coordinator.aborted == ["a"]

    with_port(test, auto_finish=False)


def test_an_abort_brings_the_partials() -> None:
    async def test(port: PortRollouts, coordinator: FakeCoordinator) -> None:
        call = asyncio.ensure_future(port.rollout(["hi"], SAMPLING, id="a"))
        while "a" not in coordinator.requests:
            await asyncio.sleep(0.01)
        await coordinator.grow(RolloutId("a"), 1)
        assert [len(s.token_ids) for s in (await port.abort("a")).samples] == [1]
        assert (await call).finished == ()

    with_port(test, auto_finish=False)


def test_a_coordinator_that_does_not_answer_is_asked_a_bounded_number_of_times() -> None:
    async def test(port: PortRollouts, coordinator: FakeCoordinator) -> None:
        coordinator.submit_error = UnavailableError("it restarts")
        with pytest.raises(UnavailableError, match="it restarts"):
            await port.rollout(["hi"], SAMPLING)
        assert coordinator.submitted == QUICK.attempts

    with_port(test)


def test_what_is_wrong_is_an_error_with_its_field() -> None:
    async def test(port: PortRollouts, coordinator: FakeCoordinator) -> None:
        for prompts, n, field in ([], 1, "prompts"), (["hi"], 17, "n"), ([[512]], 1, "prompts[0]"):
            with pytest.raises(RequestError) as refused:
                await port.rollout(prompts, SAMPLING, n=n)
            assert str(refused.value.field).startswith(field)
        with pytest.raises(UnknownIdError):
            await port.status("none")

    with_port(test)
