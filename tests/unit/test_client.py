"""The client of the native dialect, with a network that loses connections on the way."""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable

import httpx
import pytest

from actors.control_api import DiskWeights, PauseMode, ServingState, WeightUpdate
from actors.rollout_api import RolloutState
from placement.errors import (
    FlexFloorError,
    OverloadedError,
    RequestError,
    UnavailableError,
    UnknownIdError,
)
from placement.ids import RolloutId
from placement.samples import FinishReason
from service.app import create_app
from service.client import AsyncFlexFloorClient
from service.client_calls import Patience, TryAgainError
from service.client_terms import RolloutOptions, RolloutResult, body_of
from service.schemas import SampleStartBody, SamplingBody
from tests.unit.fake_coordinator import FakeCoordinator
from tests.unit.fake_network import FakeNetwork
from tests.unit.service_client import LIMIT_S, SETTINGS, FakeTokenizer

SAMPLING = SamplingBody(max_tokens=32)
QUICK = Patience(attempts=4, first_pause_s=0.001, longest_pause_s=0.05)
RESPONSE = tuple(range(10, 30))

Test = Callable[[AsyncFlexFloorClient, FakeNetwork, FakeCoordinator], Awaitable[None]]


def with_client(test: Test, *, auto_finish: bool = True) -> None:
    async def run() -> None:
        coordinator = FakeCoordinator(auto_finish=auto_finish)
        coordinator.response = RESPONSE
        app = create_app(coordinator, SETTINGS, FakeTokenizer())
        network = FakeNetwork(httpx.ASGITransport(app=app, raise_app_exceptions=False))
        async with (
            asyncio.timeout(LIMIT_S),
            AsyncFlexFloorClient("http://service", patience=QUICK, transport=network) as client,
        ):
            await test(client, network, coordinator)

    asyncio.run(run())


def test_a_rollout_comes_back_whole_and_in_order() -> None:
    async def test(
        client: AsyncFlexFloorClient, network: FakeNetwork, coordinator: FakeCoordinator
    ) -> None:
        result = await client.rollout(["hi", [1, 2]], SAMPLING, n=3, seed=5, priority=2)
        assert [(s.prompt_index, s.sample_index) for s in result.samples] == [
            (prompt, sample) for prompt in range(2) for sample in range(3)
        ]
        assert result.finished == result.samples
        assert all(sample.token_ids == RESPONSE for sample in result.samples)
        assert result.rollout.state is RolloutState.FINISHED
        (request,) = coordinator.requests.values()
        assert (request.seed, request.priority) == (5, 2)
        assert await client.status(request.rollout_id) == result.rollout

    with_client(test)


@pytest.mark.parametrize("cut", range(0, 3000, 250))
def test_a_connection_lost_at_any_byte_loses_and_doubles_no_sample(cut: int) -> None:
    async def test(
        client: AsyncFlexFloorClient, network: FakeNetwork, coordinator: FakeCoordinator
    ) -> None:
        network.cuts = [cut, network.LOST, cut // 2, None]
        result = await client.rollout(["hi"], SAMPLING, n=4)
        assert [sample.sample_index for sample in result.samples] == [0, 1, 2, 3]
        assert len(coordinator.requests) == 1

    with_client(test)


@pytest.mark.parametrize("cut", range(100, 2500, 200))
def test_a_connection_lost_at_any_byte_loses_and_doubles_no_token(cut: int) -> None:
    async def test(
        client: AsyncFlexFloorClient, network: FakeNetwork, coordinator: FakeCoordinator
    ) -> None:
        network.cuts = [cut, network.LOST, cut // 2, None]
        heard: dict[int, list[int]] = defaultdict(list)
        endings = 0
        async for news in client.stream_tokens(["hi"], SAMPLING, n=3):
            assert news.start == len(heard[news.sample_index])
            heard[news.sample_index] += news.token_ids
            endings += news.finish_reason is not None
        assert endings == 3
        assert all(tuple(ids) == RESPONSE for ids in heard.values())

    with_client(test)


def test_a_rollout_that_the_service_lost_is_asked_for_again_and_nothing_comes_twice() -> None:
    async def test(
        client: AsyncFlexFloorClient, network: FakeNetwork, coordinator: FakeCoordinator
    ) -> None:
        stream = client.stream(["hi"], SAMPLING, n=3, id="a")
        network.cuts = [2400]
        first = await anext(stream)
        coordinator.requests.clear()
        coordinator.ended.clear()
        rest = [sample async for sample in stream]
        assert sorted(s.sample_index for s in [first, *rest]) == [0, 1, 2]
        assert [asked.split("?")[0] for asked in network.asked] == [
            "POST /v1/rollouts",
            "GET /v1/rollouts/a/stream",
            "POST /v1/rollouts",
        ]

    with_client(test)


def test_whoever_stops_reading_ends_the_rollout() -> None:
    async def test(
        client: AsyncFlexFloorClient, network: FakeNetwork, coordinator: FakeCoordinator
    ) -> None:
        for leave, aborted in (True, ["a"]), (False, ["a"]):
            name = "a" if leave else "b"
            stream = client.stream(["hi"], SAMPLING, n=3, id=name, abort_on_disconnect=leave)
            await anext(stream)
            await stream.aclose()
            assert coordinator.aborted == aborted

    with_client(test)


def test_a_call_that_is_cancelled_ends_its_rollout() -> None:
    async def test(
        client: AsyncFlexFloorClient, network: FakeNetwork, coordinator: FakeCoordinator
    ) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await client.rollout(["hi"], SAMPLING, id="a")
        assert "a" in coordinator.aborted

    with_client(test, auto_finish=False)


def test_an_abort_brings_the_partials() -> None:
    async def test(
        client: AsyncFlexFloorClient, network: FakeNetwork, coordinator: FakeCoordinator
    ) -> None:
        call = asyncio.ensure_future(client.rollout(["hi"], SAMPLING, n=2, id="a"))
        while "a" not in coordinator.requests:
            await asyncio.sleep(0.01)
        await coordinator.grow(RolloutId("a"), 7)
        partial = await client.abort("a")
        assert [s.token_ids for s in partial.samples] == [RESPONSE[:7]] * 2
        assert partial.finished == ()
        assert [s.finish_reason for s in (await call).samples] == [FinishReason.ABORT] * 2
        goes_on = [
            SampleStartBody(generated_ids=list(s.token_ids), seed=s.seed) for s in partial.samples
        ]
        coordinator.auto_finish = True
        await client.rollout(["hi"], SAMPLING, n=2, id="b", samples=goes_on)
        starts = coordinator.requests[RolloutId("b")].starts
        assert starts is not None
        assert [start.generated_ids for start in starts] == [RESPONSE[:7]] * 2

    with_client(test, auto_finish=False)


@pytest.mark.parametrize(
    ("code", "error"), [(429, OverloadedError), (503, UnavailableError), (502, UnavailableError)]
)
def test_a_service_that_stays_busy_is_asked_a_bounded_number_of_times(
    code: int, error: type[FlexFloorError]
) -> None:
    async def test(
        client: AsyncFlexFloorClient, network: FakeNetwork, coordinator: FakeCoordinator
    ) -> None:
        told = {"error": {"type": "x", "message": "too much", "field": None}}
        network.refusals = [httpx.Response(code, json=told) for _ in range(9)]
        with pytest.raises(error, match="too much"):
            await client.rollout(["hi"], SAMPLING)
        assert len(network.asked) == QUICK.attempts

    with_client(test)


def test_a_busy_service_is_asked_again_when_it_says() -> None:
    error = TryAgainError("busy")
    error.after_s = 2.0
    patience = Patience(attempts=9, first_pause_s=0.5, longest_pause_s=5.0)
    assert patience.pause_s(1, error) == 2.0
    error.after_s = 1000.0
    assert patience.pause_s(1, error) == 5.0, "no service makes a client wait for ever"
    error.after_s = None
    assert 0.25 <= patience.pause_s(1, error) <= 0.5
    assert 2.5 <= patience.pause_s(8, error) <= 5.0
    with pytest.raises(TryAgainError):
        patience.pause_s(9, error)


def test_retry_after_is_read_from_the_answer() -> None:
    async def test(
        client: AsyncFlexFloorClient, network: FakeNetwork, coordinator: FakeCoordinator
    ) -> None:
        network.refusals = [httpx.Response(503, headers={"Retry-After": "0"}, text="full")]
        assert (await client.rollout(["hi"], SAMPLING)).finished
        assert len(network.asked) == 2

    with_client(test)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"n": 0}, "n"),
        ({"deadline_s": -1.0}, "deadline_s"),
        ({"priority": "high"}, "priority"),
        ({"best_of": 3}, "best_of"),
        ({"n": 17}, "n"),  # this one only the service knows
    ],
)
def test_what_is_wrong_is_an_error_with_its_field(options: RolloutOptions, field: str) -> None:
    async def test(
        client: AsyncFlexFloorClient, network: FakeNetwork, coordinator: FakeCoordinator
    ) -> None:
        with pytest.raises(RequestError) as refused:
            await client.rollout(["hi"], SAMPLING, **options)
        assert refused.value.field == field

    with_client(test)


def test_an_unknown_rollout_is_an_error_and_a_sick_service_says_what_is_wrong() -> None:
    async def test(
        client: AsyncFlexFloorClient, network: FakeNetwork, coordinator: FakeCoordinator
    ) -> None:
        with pytest.raises(UnknownIdError):
            await client.status("none")
        with pytest.raises(UnknownIdError):
            await client.abort("none")
        assert (await client.health()).healthy
        assert [worker.slot for worker in await client.workers()] == ["GPU:0"]
        assert [operation.generation for operation in await client.operations()] == [2]
        coordinator.healthy = False
        assert "no step for 61" in (await client.health()).detail

    with_client(test)


def test_the_group_is_paused_put_to_sleep_and_given_new_weights() -> None:
    async def test(
        client: AsyncFlexFloorClient, network: FakeNetwork, coordinator: FakeCoordinator
    ) -> None:
        paused = await client.pause(PauseMode.WAIT)
        assert (paused.state, paused.mode) == (ServingState.PAUSED, PauseMode.WAIT)
        assert (await client.resume()).state is ServingState.SERVING
        assert (await client.sleep()).state is ServingState.ASLEEP
        with pytest.raises(RequestError, match="wake it"):
            await client.resume()
        assert (await client.wake()).state is ServingState.SERVING
        updated = await client.update_weights("7", "/weights/7", base_version="6", checksum="c")
        assert updated == await client.weights()
        assert updated.version == "7"
        (update,) = coordinator.updates
        assert update == WeightUpdate(DiskWeights("/weights/7"), "7", "6", "c")

    with_client(test)


def test_every_call_has_an_id_and_a_seed_of_its_own() -> None:
    bodies = [body_of(["hi"], SAMPLING, {}) for _ in range(2)]
    assert bodies[0].id != bodies[1].id
    assert bodies[0].seed != bodies[1].seed
    # A caller who names the rollout repeats it after a crash: the seed derives from the id.
    assert body_of(["hi"], SAMPLING, {"id": "a"}).seed is None


def test_results_are_in_the_order_of_the_request() -> None:
    async def test(
        client: AsyncFlexFloorClient, network: FakeNetwork, coordinator: FakeCoordinator
    ) -> None:
        result = await client.rollout(["a", "b"], SAMPLING, n=2)
        again = RolloutResult.of(result.rollout, result.samples[::-1])
        assert again == result

    with_client(test)
