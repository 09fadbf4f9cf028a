"""The SGLang dialect, in the shapes of SGLang's and slime's requests."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from placement.errors import OverloadedError
from placement.ids import RolloutId
from placement.samples import FinishReason, Sampling
from service.app import create_app
from tests.unit.fake_coordinator import FakeCoordinator
from tests.unit.service_client import (
    SETTINGS,
    FakeTokenizer,
    LeavingClient,
    run_bounded,
    with_service,
)

PATH = "/generate"
SHORT = {"max_new_tokens": 8}


async def until_accepted(coordinator: FakeCoordinator, name: str) -> None:
    while name not in coordinator.requests:
        await asyncio.sleep(0.01)


def test_slimes_request_gets_ids_logprobs_and_a_finish_reason() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        body = {
            "input_ids": [97, 98],
            "sampling_params": {
                "temperature": 0.7,
                "top_p": 0.9,
                "top_k": -1,
                "max_new_tokens": 8,
                "stop": None,
                "stop_token_ids": None,
                "skip_special_tokens": False,
                "no_stop_trim": True,
                "spaces_between_special_tokens": True,
            },
            "return_logprob": True,
        }
        answer = (await client.post(PATH, json=body)).json()
        assert answer["text"] == "hi"
        assert answer["output_ids"] == [104, 105]
        meta = answer["meta_info"]
        assert meta["output_token_logprobs"] == [[-0.5, 104, None], [-0.25, 105, None]]
        assert meta["finish_reason"] == {"type": "length", "length": 2}
        assert (meta["prompt_tokens"], meta["completion_tokens"]) == (2, 2)
        assert meta["weight_version"] == "0"
        (request,) = coordinator.requests.values()
        assert request.prompts == ((97, 98),)
        assert request.samplings == (Sampling(8, temperature=0.7, top_p=0.9),)

    with_service(test)


@pytest.mark.parametrize("prompts", [{"text": ["a", "b"]}, {"input_ids": [[97], [98]]}])
def test_a_list_is_answered_with_a_list(prompts: dict[str, Any]) -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        params = [{"max_new_tokens": 4, "temperature": 0}, {"max_new_tokens": 5}]
        body = prompts | {"sampling_params": params, "rid": "x"}
        answers = (await client.post(PATH, json=body)).json()
        assert [answer["meta_info"]["id"] for answer in answers] == ["x_0", "x_1"]
        request = coordinator.requests[RolloutId("x")]
        assert request.prompts == ((97,), (98,))
        assert request.samplings == (Sampling(4, temperature=0.0), Sampling(5))

    with_service(test)


def test_several_samples_of_one_prompt_are_a_list_too() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        body = {"text": "a", "sampling_params": SHORT | {"n": 3, "sampling_seed": 5}}
        assert len((await client.post(PATH, json=body)).json()) == 3
        (request,) = coordinator.requests.values()
        assert (request.seed, request.num_samples) == (5, 3)

    with_service(test)


def test_each_event_of_a_stream_has_all_of_its_response_so_far() -> None:
    async def test() -> None:
        coordinator = FakeCoordinator(auto_finish=False)
        coordinator.response = tuple(b"one two")
        app = create_app(coordinator, SETTINGS, FakeTokenizer())
        body = {"text": "a", "rid": "x", "stream": True, "return_logprob": True}
        client = LeavingClient(app, body, PATH)
        await until_accepted(coordinator, "x")
        await coordinator.grow(RolloutId("x"), 3)
        first = await client.next_event()
        assert (first["text"], first["meta_info"]["finish_reason"]) == ("one", None)
        await coordinator.finish(RolloutId("x"), 1)
        last = await client.next_event()
        assert (last["text"], last["output_ids"]) == ("one two", list(b"one two"))
        assert len(last["meta_info"]["output_token_logprobs"]) == 7
        assert last["meta_info"]["finish_reason"]["type"] == "length"
        await client.request

    run_bounded(test())


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_frees_its_samples(stream: bool) -> None:
    async def test() -> None:
        coordinator = FakeCoordinator(auto_finish=False)
        app = create_app(coordinator, SETTINGS, FakeTokenizer())
        client = LeavingClient(app, {"text": "a", "rid": "x", "stream": stream}, PATH)
        await until_accepted(coordinator, "x")
        await client.leave()
        while coordinator.aborted != ["x"]:
            await asyncio.sleep(0.01)

    run_bounded(test())


@pytest.mark.parametrize("body", [{"rid": "x"}, {"abort_all": True}])
def test_an_abort_answers_its_client_with_partials_and_the_load_goes_to_zero(
    body: dict[str, Any],
) -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        asked = {"text": "a", "rid": "x", "return_logprob": True}
        waiting = asyncio.create_task(client.post(PATH, json=asked))
        await until_accepted(coordinator, "x")
        await coordinator.grow(RolloutId("x"), 1)
        load = (await client.get("/v1/loads?include=core")).json()
        assert load["loads"][0]["num_running_reqs"] == 1
        assert load["aggregate"]["total_reqs"] == 1
        assert (await client.post("/abort_request", json=body)).status_code == 200
        answer = (await waiting).json()
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert answer["output_ids"] == [104]
        assert answer["meta_info"]["output_token_logprobs"] == [[-0.5, 104, None]]
        load = (await client.get("/v1/loads")).json()
        assert load["loads"][0]["num_total_reqs"] == 0

    with_service(test, auto_finish=False)


def test_an_abort_of_an_unknown_request_is_no_error() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        response = await client.post("/abort_request", json={"rid": "never-was"})
        assert response.status_code == 200
        assert (await client.post("/abort_request", json={})).status_code == 400

    with_service(test)


@pytest.mark.parametrize(
    ("stop", "trimmed", "text", "matched"),
    [
        ({"stop": "END"}, True, "one ", "END"),
        ({"stop": ["END"]}, False, "one END", "END"),
        ({"stop_token_ids": [33]}, True, "one END", 33),
    ],
)
def test_ids_and_text_end_with_what_stopped_them(
    stop: dict[str, Any], trimmed: bool, text: str, matched: str | int
) -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        coordinator.response = tuple(b"one END!")
        coordinator.ending = FinishReason.STOP
        params = SHORT | stop | {"no_stop_trim": not trimmed}
        answer = (await client.post(PATH, json={"text": "a", "sampling_params": params})).json()
        assert answer["text"] == text
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": matched}
        assert bytes(answer["output_ids"]) == (b"one END!" if matched == 33 else b"one END")

    with_service(test)


BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "nothing": ({}, "text", "either text or input_ids"),
    "both": ({"text": "a", "input_ids": [1]}, "text", "either"),
    "an empty text": ({"text": ""}, "text", "no tokens"),
    "an empty list": ({"input_ids": []}, "input_ids", "no tokens"),
    "an id out of vocabulary": ({"input_ids": [[1], [512]]}, "input_ids[1][0]", "0 to 511"),
    "a stop id out of vocabulary": (
        {"text": "a", "sampling_params": {"stop_token_ids": [600]}},
        "sampling_params.stop_token_ids[0]",
        "0 to 511",
    ),
    "too long": ({"text": "a" * 99, "sampling_params": SHORT}, "text", "takes 100"),
    "no new tokens": (
        {"text": "a", "sampling_params": {"max_new_tokens": -1}},
        "sampling_params.max_new_tokens",
        "got -1",
    ),
    "a grammar": (
        {"text": "a", "sampling_params": {"regex": "a*"}},
        "sampling_params.regex",
        "only null is served",
    ),
    "prompt logprobs": ({"text": "a", "logprob_start_len": -2}, "logprob_start_len", "got -2"),
    "an unknown field": ({"text": "a", "sampling": {}}, "sampling", "no field"),
    "too few parameters": (
        {"text": ["a", "b"], "sampling_params": [SHORT]},
        "sampling_params",
        "1 entries for 2",
    ),
    "a strange rid": ({"text": "a", "rid": "a b"}, "rid", "'a b'"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_named_in_sglangs_shape(name: str) -> None:
    body, field, words = BAD[name]

    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        if "sampling_params" not in body:
            body["sampling_params"] = SHORT
        response = await client.post(PATH, json=body)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["field"] == field
        assert words in error["message"]
        assert coordinator.submitted == 0

    with_service(test)


def test_an_id_that_belongs_to_another_request_is_refused_by_its_name() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        body = {"text": "a", "rid": "x", "sampling_params": SHORT}
        first, again = [(await client.post(PATH, json=body)).json() for _ in range(2)]
        assert first == again
        refused = await client.post(PATH, json=body | {"text": "b"})
        assert (refused.status_code, refused.json()["error"]["field"]) == (400, "rid")

    with_service(test)


def test_a_full_queue_says_when_to_come_back() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        coordinator.submit_error = OverloadedError("9 samples are open; wait")
        response = await client.post(PATH, json={"text": "a", "sampling_params": SHORT})
        assert response.status_code == 429
        assert response.headers["retry-after"] == "2"
        assert json.loads(response.text)["error"]["type"] == "OverloadedError"

    with_service(test)


def test_the_server_says_what_it_is() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        for path in ("/server_info", "/get_server_info"):
            told = (await client.get(path)).json()
            assert told["model_path"] == told["vllm_config"]["model_config"]["model"]
            assert (told["tp_size"], told["dp_size"]) == (1, 1)
        assert (await client.get("/get_weight_version")).json() == {"weight_version": "0"}
        assert (await client.get("/health_generate")).status_code == 200
        coordinator.healthy = False
        assert (await client.get("/health_generate")).status_code == 503

    with_service(test)
