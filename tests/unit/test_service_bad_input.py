from typing import Any

import httpx
import pytest

from placement.errors import (
    FlexFloorError,
    LeaseTimeoutError,
    OverloadedError,
    PlanError,
    UnavailableError,
)
from service.app import create_app
from service.settings import ServiceSettings
from tests.unit.fake_coordinator import FakeCoordinator
from tests.unit.service_client import SETTINGS, body, run_bounded, with_service

SAMPLING = {"max_tokens": 8}

BAD_BODIES: dict[str, tuple[dict[str, Any], str, str]] = {
    "an empty prompt": (body(prompts=["ok", ""]), "prompts[1]", "no tokens"),
    "an empty list of ids": (body(prompts=[[]]), "prompts[0]", "no tokens"),
    "no prompts": (body(prompts=[]), "prompts", "at least 1"),
    "prompts as a text": (body(prompts="hi"), "prompts", "array"),
    "a prompt of another kind": (body(prompts=[3]), "prompts[0]", "list of token ids"),
    "an id out of vocabulary": (body(prompts=[[1, 512]]), "prompts[0][1]", "0 to 511"),
    "a negative id": (body(prompts=[[1, -1]]), "prompts[0][1]", "got -1"),
    "an id that is a text": (body(prompts=[["1"]]), "prompts[0][0]", "integer"),
    "an id that is a truth value": (body(prompts=[[True]]), "prompts[0][0]", "integer"),
    "a prompt that is too long": (
        body(prompts=[[1] * 93]),
        "prompts[0]",
        "93 tokens, and with max_tokens 8 needs 101, but this service takes 100",
    ),
    "no sampling": ({"prompts": ["hi"]}, "sampling", "required"),
    "no max_tokens": (body(sampling={}), "sampling.max_tokens", "required"),
    "max_tokens 0": (body(sampling={"max_tokens": 0}), "sampling.max_tokens", "got 0"),
    "max_tokens as text": (body(sampling={"max_tokens": "8"}), "sampling.max_tokens", "'8'"),
    "huge max_tokens": (body(sampling={"max_tokens": 10**30}), "sampling.max_tokens", ""),
    "a negative temperature": (
        body(sampling=SAMPLING | {"temperature": -0.1}),
        "sampling.temperature",
        "got -0.1",
    ),
    "top_p 0": (body(sampling=SAMPLING | {"top_p": 0}), "sampling.top_p", "greater than 0"),
    "top_k -1": (body(sampling=SAMPLING | {"top_k": -1}), "sampling.top_k", "got -1"),
    "a stop id out of vocabulary": (
        body(sampling=SAMPLING | {"stop_token_ids": [5, 999]}),
        "sampling.stop_token_ids[1]",
        "token id 999",
    ),
    "n 0": (body(n=0), "n", "got 0"),
    "huge n": (body(n=10**9), "n", "1000000000 samples, but one rollout takes 16"),
    "too many prompts": (body(prompts=["a"] * 9), "prompts", "9 prompts"),
    "a negative seed": (body(seed=-1), "seed", "got -1"),
    "a seed beyond 63 bits": (body(seed=1 << 63), "seed", ""),
    "an unknown field": (body(temprature=1), "temprature", "not permitted"),
    "an unknown sampling field": (
        body(sampling=SAMPLING | {"best_of": 2}),
        "sampling.best_of",
        "not permitted",
    ),
    "an unknown strategy": (body(strategy="best"), "strategy", "'elastic' or 'static'"),
    "an id with a slash": (body(id="a/b"), "id", "pattern"),
    "stream as text": (body(stream="yes"), "stream", "'samples' or 'tokens'"),
    "replay lengths of another shape": (
        body(n=2, replay_stop_tokens=[[1]]),
        "replay_stop_tokens[0]",
        "1 entries for n=2",
    ),
    "a replay length beyond max_tokens": (
        body(replay_stop_tokens=[[9]]),
        "replay_stop_tokens[0][0]",
        "1 to max_tokens, 8",
    ),
    "samplings of another shape": (
        body(sample_samplings=[[SAMPLING], [SAMPLING]]),
        "sample_samplings",
        "2 rows for 1 prompts",
    ),
    "an override that is too long": (
        body(sample_samplings=[[{"max_tokens": 99}]]),
        "prompts[0]",
        "max_tokens 99 needs 101",
    ),
}


@pytest.mark.parametrize("name", BAD_BODIES)
def test_a_wrong_request_is_refused_with_its_field(name: str) -> None:
    payload, field, words = BAD_BODIES[name]

    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        response = await client.post("/v1/rollouts", json=payload)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["type"] == "RequestError"
        assert error["field"] == field
        assert words in error["message"]
        assert coordinator.submitted == 0

    with_service(test)


@pytest.mark.parametrize(
    "content",
    [b"", b"not json", b"[1, 2]", b"null", b'{"prompts": ["hi"', b"\xff\xfe"],
)
def test_a_body_that_is_no_json_object_is_refused(content: bytes) -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        response = await client.post("/v1/rollouts", content=content)
        assert response.status_code == 400
        assert response.json()["error"]["type"] == "RequestError"

    with_service(test)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_temperature_that_is_not_a_number_is_refused(number: str) -> None:
    content = f'{{"prompts": ["hi"], "sampling": {{"max_tokens": 1, "temperature": {number}}}}}'

    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        response = await client.post("/v1/rollouts", content=content)
        assert response.status_code == 400
        assert response.json()["error"]["field"] == "sampling.temperature"

    with_service(test)


def test_a_body_with_too_many_bytes_is_413() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        response = await client.post("/v1/rollouts", json=body(prompts=["x" * 2000]))
        assert response.status_code == 413
        assert "1024 bytes" in response.json()["error"]["message"]

    with_service(test, settings=ServiceSettings(max_request_bytes=1024))


def test_a_text_prompt_without_a_tokenizer_is_refused() -> None:
    async def test() -> None:
        app = create_app(FakeCoordinator(), SETTINGS, None)
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
            refused = await client.post("/v1/rollouts", json=body())
            assert refused.status_code == 400
            assert "has no tokenizer" in refused.json()["error"]["message"]
            taken = await client.post("/v1/rollouts", json=body(prompts=[[1]]))
            assert taken.status_code == 200
            assert taken.json()["samples"][0]["text"] is None

    run_bounded(test())


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/rollouts/none", 404),
        ("DELETE", "/v1/rollouts/none", 404),
        ("GET", "/v1/rollouts/none?cursor=-1", 400),
        ("GET", "/v1/rollouts/none?wait_s=nan", 400),
        ("GET", "/nothing-here", 404),
        ("PUT", "/v1/rollouts", 405),
    ],
)
def test_wrong_paths_and_parameters_have_the_same_shape(
    method: str, path: str, status: int
) -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        response = await client.request(method, path)
        assert response.status_code == status
        assert response.json()["error"].keys() == {"type", "message", "field"}

    with_service(test)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (OverloadedError("65536 samples are open; try later"), 429),
        (UnavailableError("not started"), 503),
        (LeaseTimeoutError("no slot within 60 s"), 503),
        (PlanError("two owners"), 500),
        (RuntimeError("unexpected"), 500),
    ],
)
def test_the_coordinators_errors_have_a_status_and_a_name(error: Exception, status: int) -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        coordinator.submit_error = error
        response = await client.post("/v1/rollouts", json=body())
        assert response.status_code == status
        assert response.json()["error"]["type"] == type(error).__name__
        assert ("retry-after" in response.headers) == (status in (429, 503))
        if isinstance(error, FlexFloorError):
            assert response.json()["error"]["message"] == error.message

    with_service(test)
