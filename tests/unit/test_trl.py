"""What TRL's clients ask, and read from the answers.

The paths that end with a slash are asked by ``trl.extras.vllm_client`` and its successor until
1.13 (read in 1.9.2), the others by ``trl.generation.vllm_client`` of 1.16, the newest.
"""

import base64
import json
from typing import Any

import httpx
import numpy as np
import pytest

from placement.samples import Sampling
from tests.unit.fake_coordinator import FakeCoordinator
from tests.unit.fake_detail import prompt_logprob
from tests.unit.service_client import waiting_for_samples, with_service

GENERATE = {
    "prompts": ["ab", "c"],
    "images": None,
    "n": 2,
    "repetition_penalty": 1.0,
    "temperature": 0.9,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "max_tokens": 16,
    "logprobs": 0,
    "structured_outputs_regex": None,
    "generation_kwargs": {},
}
CHAT = {name: value for name, value in GENERATE.items() if name not in ("prompts", "images")} | {
    "messages": [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]],
    "chat_template_kwargs": {},
    "tools": None,
}
SCORE = {
    "sequences": [[10, 20, 30, 40], [50, 60]],
    "prompt_lengths": [2, 1],
    "top_logprobs": 2,
    "temperature": 0.7,
    "response_format": "json",
}
COMMUNICATOR = {"host": "0.0.0.0", "port": 51216, "world_size": 2, "client_device_uuid": "u"}


def test_the_classic_client_gets_ids_and_logprobs_prompt_by_prompt() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        assert (await client.get("/health/")).status_code == 200
        answer = (await client.post("/generate/", json=GENERATE)).json()
        assert answer["prompt_ids"] == [[97, 98], [99]]
        assert answer["completion_ids"] == [[104, 105]] * 4
        assert answer["logprobs"] == [[[-0.5], [-0.25]]] * 4
        assert answer["logprob_token_ids"] == [[[104], [105]]] * 4
        (request,) = coordinator.requests.values()
        assert (request.num_samples, request.samplings[0]) == (2, Sampling(16, temperature=0.9))

    with_service(test)


def test_the_classic_client_may_have_alternatives_or_no_logprobs() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        one = GENERATE | {"prompts": [[97]], "n": 1}
        answer = (await client.post("/generate/", json=one | {"logprobs": 2})).json()
        assert answer["logprob_token_ids"] == [[[104, 105, 106], [105, 106, 107]]]
        assert answer["logprobs"] == [[[-0.5, -2.0, -3.0], [-0.25, -2.0, -3.0]]]
        answer = (await client.post("/generate/", json=one | {"logprobs": None})).json()
        assert (answer["logprobs"], answer["logprob_token_ids"]) == (None, None)

    with_service(test)


def test_vllms_own_parameters_go_before_those_of_the_same_name() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        kwargs = {"seed": 5, "max_tokens": 4, "ignore_eos": True}
        answer = await client.post("/generate/", json=GENERATE | {"generation_kwargs": kwargs})
        assert answer.status_code == 200
        (request,) = coordinator.requests.values()
        assert (request.seed, request.samplings[0].max_tokens) == (5, 4)
        assert request.samplings[0].ignore_eos

    with_service(test)


def test_the_classic_client_chats_in_batches() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        answer = (await client.post("/chat/", json=CHAT)).json()
        assert [bytes(ids) for ids in answer["prompt_ids"]] == [
            b"user: a\nassistant: ",
            b"user: b\nassistant: ",
        ]
        assert answer["completion_ids"] == [[104, 105]] * 4

    with_service(test)


def test_sequences_are_scored_behind_their_prompts() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        answer = (await client.post("/get_sequence_logprobs/", json=SCORE)).json()
        at_2, at_3, at_1 = (prompt_logprob(at) for at in (2, 3, 1))
        assert answer["logprob_token_ids"] == [[[30, 31, 32], [40, 41, 42]], [[60, 61, 62]]]
        assert answer["logprobs"] == [
            [[at_2, -3.0, -4.0], [at_3, -3.0, -4.0]],
            [[at_1, -3.0, -4.0]],
        ]
        (request,) = coordinator.requests.values()
        assert {sampling.temperature for sampling in request.samplings} == {0.7}

    with_service(test)


def test_scores_come_as_arrays_too() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        body = SCORE | {"response_format": "binary"}
        answer = (await client.post("/get_sequence_logprobs/", json=body)).json()
        assert answer["shape"] == [2, 2, 2]
        assert answer["completion_lengths"] == [2, 1]

        def array(name: str, dtype: type, top: int) -> list[Any]:
            found = np.frombuffer(base64.b64decode(answer[name]), dtype).reshape(2, 2, top)
            listed: list[Any] = found.tolist()
            return listed

        nothing = -float("inf")
        assert array("token_ids_b64", np.int32, 2) == [[[31, 32], [41, 42]], [[61, 62], [0, 0]]]
        assert array("logprobs_b64", np.float32, 2) == [
            [[-3, -4], [-3, -4]],
            [[-3, -4], [nothing, nothing]],
        ]
        assert array("actual_token_ids_b64", np.int32, 1) == [[[30], [40]], [[60], [0]]]
        at_2, at_3, at_1 = (prompt_logprob(at) for at in (2, 3, 1))
        assert array("actual_logprobs_b64", np.float32, 1) == [
            [[at_2], [at_3]],
            [[at_1], [nothing]],
        ]

    with_service(test)


def test_the_classic_communicator_is_refused_with_what_to_use_instead() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        assert (await client.get("/get_world_size/")).json() == {"world_size": 1}
        asked = {
            "/init_communicator/": COMMUNICATOR,
            "/update_named_param/": {"name": "a", "dtype": "torch.bfloat16", "shape": [2]},
            "/batch_update_named_params/": {"params": []},
        }
        for path, content in asked.items():
            answer = await client.post(path, json=content)
            assert answer.status_code == 501
            assert "/v1/weights" in answer.json()["error"]["message"]
        assert (await client.post("/close_communicator/")).status_code == 200

    with_service(test)


def test_the_classic_reset_is_200_only_when_nothing_runs() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        assert (await client.post("/reset_prefix_cache/")).status_code == 200
        async with waiting_for_samples(client, coordinator, "r"):
            assert (await client.post("/reset_prefix_cache/")).status_code == 400

    with_service(test)


def test_a_slash_tells_trls_paths_from_the_others() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        text = {"text": "a", "sampling_params": {"max_new_tokens": 2}}
        assert "meta_info" in (await client.post("/generate", json=text)).json()
        assert "completion_ids" in (await client.post("/generate/", json=GENERATE)).json()
        for path in ("/v1/workers/", "/health_generate/", "/is_paused/"):
            assert (await client.get(path)).status_code == 404, "no redirects"

    with_service(test)


def test_the_newest_client_generates_by_openais_route() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        assert (await client.get("/health")).status_code == 200
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        payload = {
            "model": model,
            "prompt": [[97], [98]],
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "n": 2,
            "repetition_penalty": 1.0,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "max_tokens": 16,
            "logprobs": 0,
        }
        choices = (await client.post("/v1/completions", json=payload)).json()["choices"]
        assert [choice["prompt_token_ids"] for choice in choices[::2]] == [[97], [98]]
        assert [choice["token_ids"] for choice in choices] == [[104, 105]] * 4
        logprobs = choices[0]["logprobs"]
        assert logprobs["tokens"] == ["token_id:104", "token_id:105"]
        assert logprobs["token_logprobs"] == [-0.5, -0.25]
        assert logprobs["top_logprobs"] == [{"token_id:104": -0.5}, {"token_id:105": -0.25}]

    with_service(test)


def test_the_newest_client_chats_by_openais_route() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        payload = {
            "model": "/models/fake",
            "messages": [{"role": "user", "content": "a"}],
            "n": 1,
            "repetition_penalty": 1.0,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "max_tokens": 16,
            "logprobs": True,
            "top_logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        answer = (await client.post("/v1/chat/completions", json=payload)).json()
        assert bytes(answer["prompt_token_ids"]) == b"user: a\nassistant: "
        (choice,) = answer["choices"]
        assert choice["token_ids"] == [104, 105]
        content = choice["logprobs"]["content"]
        assert [(entry["token"], entry["top_logprobs"]) for entry in content] == [
            ("token_id:104", []),
            ("token_id:105", []),
        ]

    with_service(test)


def test_the_newest_client_scores_by_openais_route() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        payload = {
            "model": "/models/fake",
            "prompt": [[10, 20, 30]],
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 100,
        }
        answer = (await client.post("/v1/completions", json=payload)).json()
        told = answer["choices"][0]["prompt_logprobs"]
        assert told[0] is None
        assert told[2]["30"]["logprob"] == prompt_logprob(2)
        assert {"rank", "logprob"} <= set(told[2]["31"])

    with_service(test)


def test_the_newest_client_learns_that_there_is_no_nccl_transfer() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        answer = await client.get("/server_info", params={"config_format": "json"})
        assert answer.json()["vllm_config"]["weight_transfer_config"] is None
        answer = await client.post("/reset_prefix_cache")
        assert json.loads(answer.text) == {"success": True}

    with_service(test)


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "no prompts": ("/generate/", GENERATE | {"prompts": []}, "prompts"),
    "an empty prompt": ("/generate/", GENERATE | {"prompts": [[1], []]}, "prompts[1]"),
    "a foreign id": ("/generate/", GENERATE | {"prompts": [[512]]}, "prompts[0][0]"),
    "images": ("/generate/", GENERATE | {"images": [["aGk="]]}, "images"),
    "min_p": ("/generate/", GENERATE | {"min_p": 0.1}, "generation_kwargs.min_p"),
    "temperature": ("/generate/", GENERATE | {"temperature": -1.0}, "temperature"),
    "a regular expression": (
        "/generate/",
        GENERATE | {"structured_outputs_regex": "a+"},
        "structured_outputs_regex",
    ),
    "a parameter": (
        "/generate/",
        GENERATE | {"generation_kwargs": {"max_tokens": 0}},
        "generation_kwargs.max_tokens",
    ),
    "an unknown parameter": (
        "/generate/",
        GENERATE | {"generation_kwargs": {"beams": 2}},
        "generation_kwargs.beams",
    ),
    "a role": ("/chat/", CHAT | {"messages": [[{"role": "nobody", "content": ""}]]}, "messages[0]"),
    "tools": ("/chat/", CHAT | {"tools": [{"name": "f"}]}, "tools"),
    "one length": ("/get_sequence_logprobs/", SCORE | {"prompt_lengths": [1]}, "prompt_lengths"),
    "a length": (
        "/get_sequence_logprobs/",
        SCORE | {"prompt_lengths": [2, 3]},
        "prompt_lengths[1]",
    ),
    "too many": ("/get_sequence_logprobs/", SCORE | {"top_logprobs": 1000}, "top_logprobs"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name: str) -> None:
    path, content, field = WRONG[name]

    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        answer = await client.post(path, json=content)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["field"] == field
        assert coordinator.submitted == 0

    with_service(test)
