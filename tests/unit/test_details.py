"""Routed experts, prompt logprobs and alternatives, in the shape that each dialect's clients read.

The fake coordinator's numbers can be computed (``fake_detail``), so every shape is compared with
what it has to say, by the decoding that its clients do.
"""

import base64
import io
import json
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest

from placement.ids import RolloutId
from placement.samples import FinishReason, Sampling
from tests.unit.fake_coordinator import FakeCoordinator
from tests.unit.fake_detail import ROUTING, prompt_logprob, row
from tests.unit.service_client import body, with_service

PROMPT = [10, 20, 30]
SHAPE = (len(PROMPT) + 1, ROUTING.layers, ROUTING.top_k)
ROWS = np.array([row(position) for position in range(SHAPE[0])]).reshape(SHAPE)


def from_npy(text: str) -> npt.NDArray[Any]:
    """As clients of vLLM do."""
    array: npt.NDArray[Any] = np.load(io.BytesIO(base64.b64decode(text)))
    return array


def events(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_native_answers_have_what_was_asked_and_null_for_the_rest() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        asked = body(
            prompts=[PROMPT], id="a", routed_experts=True, prompt_logprobs=1, top_logprobs=2
        )
        sample = (await client.post("/v1/rollouts", json=asked)).json()["samples"][0]
        routed = sample["routed_experts"]
        assert (routed["shape"], routed["dtype"], routed["missing"]) == ([*SHAPE], "uint16", "")
        flat = np.frombuffer(base64.b64decode(routed["base64"]), routed["dtype"])
        assert np.array_equal(flat.reshape(routed["shape"]), ROWS)
        assert sample["prompt_logprobs"] == {
            "logprobs": [prompt_logprob(1), prompt_logprob(2)],
            "ranks": [1, 2],
            "top": [[[[21, -3.0]], [[31, -3.0]]]][0],
        }
        assert sample["top_logprobs"][0] == [[105, -2.0], [106, -3.0]]
        assert "detail" not in sample
        (sampling,) = coordinator.requests[RolloutId("a")].samplings
        assert sampling == Sampling(8, top_logprobs=2, prompt_logprobs=1, routed_experts=True)
        plain = (await client.post("/v1/rollouts", json=body(prompts=[PROMPT]))).json()
        asked_for = ("routed_experts", "prompt_logprobs", "top_logprobs")
        assert [plain["samples"][0][name] for name in asked_for] == [None] * 3

    with_service(test)


def test_lines_of_tokens_have_the_rows_that_their_tokens_were_made_of() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        asked = body(
            prompts=[PROMPT],
            stream="tokens",
            routed_experts=True,
            prompt_logprobs=0,
            top_logprobs=1,
        )
        response = await client.post("/v1/rollouts", json=asked)
        lines = [json.loads(line) for line in response.text.splitlines()]
        told = [s for line in lines if line["type"] == "tokens" for s in line["samples"]]
        routed = [sample["routed_experts"] for sample in told]
        flat = b"".join(base64.b64decode(rows["base64"]) for rows in routed)
        assert sum(rows["shape"][0] for rows in routed) == len(PROMPT) + 1
        assert np.array_equal(np.frombuffer(flat, "uint16").reshape(SHAPE), ROWS)
        assert told[0]["prompt_logprobs"]["ranks"] == [1, 2]
        assert len(told[0]["top_logprobs"]) == len(told[0]["token_ids"])

    with_service(test)


def test_rows_that_are_missing_make_no_array_and_say_why() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        asked = body(prompts=[PROMPT], id="a", routed_experts=True)
        await client.post("/v1/rollouts", json=asked)
        (result,) = coordinator.ended[RolloutId("a")]
        assert result.detail is not None
        object.__setattr__(result, "detail", result.detail.cut(0, 1))  # the last row got lost
        answer = await client.get("/v1/rollouts/a", params={"samples": True})
        routed = answer.json()["samples"][0]["routed_experts"]
        assert routed["base64"] is None
        assert routed["missing"] == "3 rows were told for 5 tokens, which have 4"

    with_service(test)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/inference/v1/generate", {"token_ids": PROMPT}),
        ("/v1/completions", {"prompt": PROMPT}),
    ],
)
def test_vllms_clients_load_routed_experts_as_npy(
    path: str, asked: dict[str, Any], stream: bool
) -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        response = await client.post(
            path, json=asked | {"return_routed_experts": True, "stream": stream}
        )
        answers = events(response.text) if stream else [response.json()]
        array = from_npy(answers[-1]["choices"][0]["routed_experts"])
        assert array.dtype == np.uint16
        assert np.array_equal(array, ROWS)
        silent = (await client.post(path, json=asked)).json()
        assert "routed_experts" not in silent["choices"][0]

    with_service(test)


def test_sglangs_clients_read_routed_experts_as_int32() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        asked = {"input_ids": PROMPT, "return_routed_experts": True}
        meta = (await client.post("/generate", json=asked)).json()["meta_info"]
        flat = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32)
        num_tokens = meta["prompt_tokens"] + meta["completion_tokens"]
        assert np.array_equal(flat.reshape(num_tokens - 1, ROUTING.layers, -1), ROWS)

    with_service(test)


def test_a_stop_string_cuts_the_rows_with_the_tokens() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        coordinator.response = tuple(b"one END two")
        asked = {
            "token_ids": PROMPT,
            "sampling_params": {"max_tokens": 20, "stop": "END", "logprobs": 1},
            "return_routed_experts": True,
        }
        choice = (await client.post("/inference/v1/generate", json=asked)).json()["choices"][0]
        num_tokens = len(PROMPT) + len(choice["token_ids"])
        assert choice["finish_reason"] == "stop"
        assert from_npy(choice["routed_experts"]).shape[0] == num_tokens - 1
        assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])

    with_service(test)


def test_a_model_whose_routers_do_not_tell_is_named_before_anything_is_accepted() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        coordinator.model = replace(coordinator.model, routing=None)
        for path, asked, field in (
            ("/v1/rollouts", body(routed_experts=True), "routed_experts"),
            (
                "/v1/completions",
                {"prompt": "a", "return_routed_experts": True},
                "return_routed_experts",
            ),
        ):
            response = await client.post(path, json=asked)
            assert response.status_code == 400
            assert field in response.text
            assert "do not tell where they route to" in response.text
        assert coordinator.submitted == 0

    with_service(test)


def test_prompt_logprobs_are_by_token_id_with_ranks_as_trl_sorts_them() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        asked = {"prompt": [PROMPT, [7]], "max_tokens": 1, "prompt_logprobs": 100}
        coordinator.response = (104,)
        first, second = (await client.post("/v1/completions", json=asked)).json()["choices"]
        told = first["prompt_logprobs"]
        assert len(told) == len(PROMPT)
        assert told[0] is None
        assert told[1]["20"] == {"logprob": prompt_logprob(1), "rank": 1, "decoded_token": "\x14"}
        assert sorted(entry["rank"] for entry in told[1].values()) == sorted([1, *range(1, 101)])
        assert second["prompt_logprobs"] == [None]

    with_service(test)


def test_the_token_server_and_chat_have_prompt_logprobs_beside_the_choices() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        params = {"max_tokens": 8, "prompt_logprobs": 0}
        asked: dict[str, Any] = {"token_ids": PROMPT, "sampling_params": params}
        answer = (await client.post("/inference/v1/generate", json=asked)).json()
        assert [list(place) for place in answer["prompt_logprobs"][1:]] == [["20"], ["30"]]
        asked = {"messages": [{"role": "user", "content": "a"}], "prompt_logprobs": 0}
        chat = (await client.post("/v1/chat/completions", json=asked)).json()
        assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]

    with_service(test)


@pytest.mark.parametrize("stream", [False, True])
def test_echo_puts_the_prompts_logprobs_before_the_responses(stream: bool) -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        asked = {"prompt": "abc", "echo": True, "logprobs": 1, "stream": stream}
        response = await client.post("/v1/completions", json=asked)
        answers = events(response.text) if stream else [response.json()]
        parts = [a["choices"][0]["logprobs"] for a in answers]
        whole = {name: [entry for part in parts for entry in part[name]] for name in parts[0]}
        assert whole["tokens"] == ["a", "b", "c", "h", "i"]
        assert whole["token_logprobs"] == [None, prompt_logprob(1), prompt_logprob(2), -0.5, -0.25]
        assert whole["text_offset"] == [0, 1, 2, 3, 4]
        assert whole["top_logprobs"][0] is None
        assert whole["top_logprobs"][1] == {"b": prompt_logprob(1), "c": -3.0}
        assert whole["top_logprobs"][4] == {"i": -0.25, "j": -2.0}

    with_service(test)


def test_no_tokens_score_the_prompt_alone() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        asked: dict[str, Any] = {"prompt": "abc", "echo": True, "logprobs": 0, "max_tokens": 0}
        choice = (await client.post("/v1/completions", json=asked)).json()["choices"][0]
        assert choice["text"] == "abc"
        assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
        asked = {
            "input_ids": PROMPT,
            "sampling_params": {"max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "return_routed_experts": True,
        }
        answer = (await client.post("/generate", json=asked)).json()
        assert answer["output_ids"] == []
        assert answer["meta_info"]["completion_tokens"] == 0
        assert len(answer["meta_info"]["input_token_logprobs"]) == len(PROMPT)
        flat = np.frombuffer(base64.b64decode(answer["meta_info"]["routed_experts"]), np.int32)
        assert flat.tolist() == ROWS[: len(PROMPT) - 1].reshape(-1).tolist()

    with_service(test)


def test_sglangs_input_logprobs_begin_where_they_are_asked_to() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        asked = {
            "input_ids": PROMPT,
            "return_logprob": True,
            "logprob_start_len": 1,
            "top_logprobs_num": 1,
        }
        meta = (await client.post("/generate", json=asked)).json()["meta_info"]
        assert meta["input_token_logprobs"] == [[None, 20, None], [prompt_logprob(2), 30, None]]
        assert meta["input_top_logprobs"] == [None, [[-3.0, 31, None]]]
        assert meta["output_top_logprobs"] == [[[-2.0, 105, None]], [[-2.0, 106, None]]]
        del asked["logprob_start_len"]
        meta = (await client.post("/generate", json=asked)).json()["meta_info"]
        assert "input_token_logprobs" not in meta

    with_service(test)


def test_a_chat_has_alternatives_and_needs_logprobs_for_them() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        asked = {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}
        response = await client.post("/v1/chat/completions", json=asked)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "top_logprobs"
        answer = await client.post("/v1/chat/completions", json=asked | {"logprobs": True})
        content = answer.json()["choices"][0]["logprobs"]["content"]
        assert [top["token"] for top in content[0]["top_logprobs"]] == ["i", "j"]

    with_service(test)


def test_scoring_that_was_aborted_says_so() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        coordinator.ending, coordinator.response = FinishReason.ABORT, ()
        asked = {"prompt": "abc", "echo": True, "logprobs": 0, "max_tokens": 0}
        choice = (await client.post("/v1/completions", json=asked)).json()["choices"][0]
        assert choice["finish_reason"] == "abort"
        assert choice["logprobs"]["tokens"] == []

    with_service(test)
