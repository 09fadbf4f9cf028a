"""verl's calls as it makes them, answered as it expects; the interface itself is compared with the
installed verl's in tests/deploy."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from actors.control_api import PauseMode, ServingState
from deploy.verl_server import VerlServer
from placement.errors import RequestError, UnavailableError
from placement.samples import FinishReason
from service.client_calls import Patience
from tests.unit.fake_coordinator import MODEL, FakeCoordinator
from tests.unit.service_client import LIMIT_S

# As verl's agent loop sends them.
PARAMS = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "repetition_penalty": 1.0,
    "logprobs": True,
}
QUICK = Patience(attempts=3, first_pause_s=0.001, longest_pause_s=0.05)


def with_server(
    test: Callable[[VerlServer, FakeCoordinator], Awaitable[None]], *, auto_finish: bool = True
) -> None:
    async def run() -> None:
        coordinator = FakeCoordinator(auto_finish=auto_finish)
        server = VerlServer(
            coordinator,
            response_tokens=8,
            budget_tokens=12,
            routed_experts=False,
            output=dict,
            patience=QUICK,
        )
        async with asyncio.timeout(LIMIT_S):
            await test(server, coordinator)

    asyncio.run(run())


def test_a_response_has_what_verls_token_output_has() -> None:
    async def test(server: VerlServer, coordinator: FakeCoordinator) -> None:
        await server.set_global_steps(17)
        told = await server.generate([1, 2, 3], PARAMS, request_id="a", priority=3)
        assert told["token_ids"] == [104, 105]
        assert told["log_probs"] == [-0.5, -0.25]
        assert (told["stop_reason"], told["num_preempted"]) == ("completed", 0)
        assert told["extra_fields"]["global_steps"] == 17
        (request,) = coordinator.requests.values()
        assert (request.prompts, request.priority) == (((1, 2, 3),), -3)

    with_server(test)


@pytest.mark.parametrize(
    ("prompt_tokens", "params", "max_tokens"),
    [
        (3, {}, 8),  # the configured length of a response
        (9, {}, 3),  # what prompt and response have together
        (40, {}, 1),
        (3, {"max_tokens": 20}, 20),
        (3, {"max_new_tokens": 20}, 20),
        (90, {"max_tokens": 20}, 10),  # what the context has room for
    ],
)
def test_a_response_is_bounded_as_verl_bounds_it(
    prompt_tokens: int, params: dict[str, Any], max_tokens: int
) -> None:
    async def test(server: VerlServer, coordinator: FakeCoordinator) -> None:
        assert MODEL.max_model_len == 100
        await server.generate([1] * prompt_tokens, PARAMS | params, request_id="a")
        (request,) = coordinator.requests.values()
        assert request.samplings[0].max_tokens == max_tokens

    with_server(test)


def test_one_id_for_several_turns_is_several_responses_and_a_repeated_turn_is_one() -> None:
    async def test(server: VerlServer, coordinator: FakeCoordinator) -> None:
        for prompt in ([1, 2], [1, 2, 3], [1, 2, 3]):
            await server.generate(prompt, PARAMS, request_id="conversation")
        assert [r.prompts[0] for r in coordinator.requests.values()] == [(1, 2), (1, 2, 3)]
        # A partial that is sent again as a longer prompt goes on with the same noise.
        assert len({request.seed for request in coordinator.requests.values()}) == 1

    with_server(test)


def test_an_abort_brings_partials_and_what_comes_waits_or_comes_back_empty() -> None:
    async def test(server: VerlServer, coordinator: FakeCoordinator) -> None:
        coordinator.ending = FinishReason.ABORT
        told = await server.generate([1], PARAMS, request_id="a")
        assert (told["stop_reason"], told["token_ids"]) == ("aborted", [104, 105])
        await server.abort_all_requests()
        assert (await coordinator.pause_status()).mode is PauseMode.ABORT
        await server.generate([1, 2], PARAMS, request_id="b")
        assert len(coordinator.requests) == 2
        await server.abort_all_requests(reject_request=True)
        told = await server.generate([1, 2], PARAMS, request_id="c")
        assert (told["stop_reason"], told["token_ids"]) == ("aborted", [])
        assert len(coordinator.requests) == 2
        await server.resume_generation()
        assert (await coordinator.pause_status()).state is ServingState.SERVING
        await server.generate([1, 2], PARAMS, request_id="d")
        assert len(coordinator.requests) == 3

    with_server(test)


def test_it_sleeps_and_stands_still_while_it_is_woken_for_weights_alone() -> None:
    async def test(server: VerlServer, coordinator: FakeCoordinator) -> None:
        await server.sleep()
        assert (await coordinator.pause_status()).state is ServingState.ASLEEP
        await server.wake_up(tags=["weights"])
        assert (await coordinator.pause_status()).state is ServingState.PAUSED
        await server.wake_up(tags=["kv_cache"])
        assert (await coordinator.pause_status()).state is ServingState.SERVING
        await server.release_kv_cache()
        assert (await coordinator.pause_status()).state is ServingState.PAUSED
        await server.resume_kv_cache()
        assert (await coordinator.pause_status()).state is ServingState.SERVING
        await server.clear_kv_cache()

    with_server(test)


def test_a_call_that_is_cancelled_ends_its_response() -> None:
    async def test(server: VerlServer, coordinator: FakeCoordinator) -> None:
        call = asyncio.ensure_future(server.generate([1], PARAMS, request_id="a"))
        while not coordinator.requests:
            await asyncio.sleep(0.01)
        call.cancel()
        await asyncio.wait([call])
        assert coordinator.aborted == list(coordinator.requests)

    with_server(test, auto_finish=False)


def test_a_coordinator_that_does_not_answer_is_asked_a_bounded_number_of_times() -> None:
    async def test(server: VerlServer, coordinator: FakeCoordinator) -> None:
        coordinator.results_error = UnavailableError("it restarts")
        with pytest.raises(UnavailableError, match="it restarts"):
            await server.generate([1], PARAMS, request_id="a")
        assert coordinator.submitted == QUICK.attempts

    with_server(test)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"sampling_params": {"n": 2}}, "sampling_params.n"),
        ({"sampling_params": {"temperature": -1.0}}, "sampling_params.temperature"),
        ({"sampling_params": {"presence_penalty": 0.5}}, "sampling_params.presence_penalty"),
        ({"sampling_params": {"stop": ["x"]}}, "sampling_params.stop"),
        ({"prompt_ids": [512]}, "prompt_ids[0]"),
        ({"prompt_ids": []}, "prompt_ids"),
        ({"image_data": ["x"]}, "image_data"),
    ],
)
def test_what_cannot_be_served_is_refused_by_verls_own_name(
    change: dict[str, Any], field: str
) -> None:
    async def test(server: VerlServer, coordinator: FakeCoordinator) -> None:
        call = {"prompt_ids": [1], "sampling_params": PARAMS, "request_id": "a"} | change
        with pytest.raises(RequestError) as refused:
            await server.generate(**call)
        assert refused.value.field == field
        assert not coordinator.requests

    with_server(test)
