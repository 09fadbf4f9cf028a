"""The vLLM dialect. The shapes themselves are compared with vLLM's own in ``tests/service``."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from placement.ids import RolloutId
from placement.samples import Sampling
from service.app import create_app
from tests.unit.fake_coordinator import MODEL, FakeCoordinator
from tests.unit.service_client import (
    SETTINGS,
    FakeTokenizer,
    LeavingClient,
    run_bounded,
    with_service,
)

PATH = "/inference/v1/generate"


def body(**changes: Any) -> dict[str, Any]:
    return {"token_ids": [1, 2], "sampling_params": {"max_tokens": 8}} | changes


def test_token_ids_come_back_with_logprobs_and_the_span_of_each_weight_version() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        params = {"max_tokens": 8, "temperature": 0.5, "n": 2, "logprobs": 1, "seed": 4}
        asked = body(sampling_params=params, request_id="a", model=MODEL.path)
        answer = (await client.post(PATH, json=asked)).json()
        assert (answer["request_id"], answer["output_mode"]) == ("a", "tokens")
        assert [choice["index"] for choice in answer["choices"]] == [0, 1]
        choice = answer["choices"][0]
        assert choice["token_ids"] == [104, 105]
        assert choice["finish_reason"] == "length"
        assert choice["weight_versions"] == [{"version": "0", "start": 0, "end": 2}]
        assert [(t["token_id"], t["logprob"]) for t in choice["logprobs"]["content"]] == [
            (104, -0.5),
            (105, -0.25),
        ]
        assert "text" not in choice
        assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 4, "total_tokens": 6}
        request = coordinator.requests[RolloutId("a")]
        assert request.samplings == (Sampling(8, temperature=0.5, top_logprobs=1),)

    with_service(test)


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_that_met_new_weights_names_every_span_of_its_tokens(stream: bool) -> None:
    async def test() -> None:
        coordinator = FakeCoordinator(auto_finish=False)
        coordinator.weight_spans.extend(0, "6")
        coordinator.weight_spans.extend(1, "7")
        app = create_app(coordinator, SETTINGS, FakeTokenizer())
        client = LeavingClient(app, body(request_id="a", stream=stream), PATH)
        while "a" not in coordinator.requests:
            await asyncio.sleep(0.01)
        if stream:
            await coordinator.grow(RolloutId("a"), 1)
            assert (await client.next_event())["choices"][0]["token_ids"] == [104]
        await coordinator.finish(RolloutId("a"), 1)
        answer = await (client.next_event() if stream else client.next_line())
        assert answer["choices"][0]["weight_versions"] == [
            {"version": "6", "start": 0, "end": 1},
            {"version": "7", "start": 1, "end": 2},
        ]
        await client.request

    run_bounded(test())


def test_without_a_bound_a_response_may_fill_the_context() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        assert (await client.post(PATH, json={"token_ids": [1, 2]})).status_code == 200
        (request,) = coordinator.requests.values()
        assert request.samplings[0].max_tokens == MODEL.max_model_len - 2

    with_service(test)


def test_text_comes_on_request() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        coordinator.response = tuple(b"one END two")
        params = {"max_tokens": 20, "stop": "END", "logprobs": 0}
        asked = body(output_mode="text", sampling_params=params, return_token_ids=True)
        answer = (await client.post(PATH, json=asked)).json()
        (choice,) = answer["choices"]
        assert (choice["text"], bytes(choice["token_ids"])) == ("one ", b"one END")
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "END")
        assert [t["token"] for t in choice["logprobs"]["content"]] == list("one END")
        assert answer["prompt_token_ids"] == [1, 2]

    with_service(test)


def test_a_stream_brings_new_ids_and_at_its_end_the_usage() -> None:
    async def test() -> None:
        coordinator = FakeCoordinator(auto_finish=False)
        app = create_app(coordinator, SETTINGS, FakeTokenizer())
        asked = body(
            request_id="a",
            stream=True,
            stream_options={"include_usage": True},
            return_token_ids=True,
        )
        client = LeavingClient(app, asked, PATH)
        while "a" not in coordinator.requests:
            await asyncio.sleep(0.01)
        await coordinator.grow(RolloutId("a"), 1)
        first = await client.next_event()
        assert first["prompt_token_ids"] == [1, 2]
        assert first["choices"][0]["token_ids"] == [104]
        assert first["choices"][0]["weight_versions"] is None
        await coordinator.finish(RolloutId("a"), 1)
        last = await client.next_event()
        assert "prompt_token_ids" not in last
        assert last["choices"][0]["token_ids"] == [105]
        assert last["choices"][0]["weight_versions"] == [{"version": "0", "start": 0, "end": 2}]
        usage = await client.next_event()
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 2
        await client.request

    run_bounded(test())


@pytest.mark.parametrize("named", [{"request_ids": ["a", "unknown"]}, {}])
def test_aborted_requests_are_answered_with_partials(named: dict[str, Any]) -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        waiting = asyncio.create_task(client.post(PATH, json=body(request_id="a")))
        while "a" not in coordinator.requests:
            await asyncio.sleep(0.01)
        await coordinator.grow(RolloutId("a"), 1)
        told = (await client.post("/abort_requests", json=named)).json()
        assert told == {"status": "aborted", "aborted": len(named.get("request_ids", ["a"]))}
        (choice,) = (await waiting).json()["choices"]
        assert (choice["finish_reason"], choice["token_ids"]) == ("abort", [104])

    with_service(test, auto_finish=False)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_frees_its_samples(stream: bool) -> None:
    async def test() -> None:
        coordinator = FakeCoordinator(auto_finish=False)
        app = create_app(coordinator, SETTINGS, FakeTokenizer())
        client = LeavingClient(app, body(request_id="a", stream=stream), PATH)
        while "a" not in coordinator.requests:
            await asyncio.sleep(0.01)
        await client.leave()
        while coordinator.aborted != ["a"]:
            await asyncio.sleep(0.01)

    run_bounded(test())


BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "no ids": (body(token_ids=[]), "token_ids", "no tokens"),
    "an id out of vocabulary": (body(token_ids=[1, 512]), "token_ids[1]", "0 to 511"),
    "a negative id": (body(token_ids=[-1]), "token_ids[0]", "got -1"),
    "too long": (body(token_ids=[1] * 93), "token_ids", "takes 100"),
    "more logprobs": (
        body(sampling_params={"logprobs": 21}),
        "sampling_params.logprobs",
        "got 21",
    ),
    "prompt logprobs": (
        body(sampling_params={"prompt_logprobs": 200}),
        "sampling_params.prompt_logprobs",
        "got 200",
    ),
    "a stop id out of vocabulary": (
        body(sampling_params={"stop_token_ids": [600]}),
        "sampling_params.stop_token_ids[0]",
        "0 to 511",
    ),
    "an unknown field": (body(prompt="a"), "prompt", "no field"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_named(name: str) -> None:
    asked, param, words = BAD[name]

    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        response = await client.post(PATH, json=asked)
        assert response.status_code == 400
        error = json.loads(response.text)["error"]
        assert error["param"] == param
        assert words in error["message"]
        assert coordinator.submitted == 0

    with_service(test)


def test_for_a_trainer_the_world_is_one_rank_however_wide_the_group_is() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        coordinator.width = 3
        assert len((await client.get("/v1/workers")).json()) == 3
        for query in ("", "?include_dp=false"):
            assert (await client.get(f"/get_world_size{query}")).json() == {"world_size": 1}

    with_service(test)
