"""Pauses, sleep and weights in the native dialect."""

import asyncio
from typing import Any

import httpx
import pytest

from actors.control_api import DiskWeights, PauseMode, PauseStatus, ServingState, WeightUpdate
from placement.errors import RequestError, UnavailableError, WeightUpdateError
from service.app import create_app
from service.control import next_version
from tests.unit.fake_coordinator import FakeCoordinator
from tests.unit.service_client import (
    SETTINGS,
    FakeTokenizer,
    LeavingClient,
    run_bounded,
    with_service,
)


def test_a_pause_answers_when_the_group_stands_still_and_can_be_repeated() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        for _ in range(2):
            answer = await client.post("/v1/pause", json={"mode": "keep"})
            assert answer.json() == {
                "state": "paused",
                "mode": "keep",
                "waiting_for": "",
                "error": "",
            }
        assert (await client.get("/v1/pause")).json()["state"] == "paused"
        assert (await client.post("/v1/resume")).json()["state"] == "serving"
        assert (await client.post("/v1/pause")).json()["mode"] == "keep", "without a body: keep"

    with_service(test)


def test_a_sleep_and_a_waking_answer_at_their_end() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        assert (await client.post("/v1/sleep", json={"mode": "wait"})).json()["state"] == "asleep"
        refused = await client.post("/v1/resume")
        assert refused.status_code == 400
        assert "wake" in refused.json()["error"]["message"]
        answer = await client.post("/v1/wake", json={"paused": True})
        assert answer.json()["state"] == "paused"
        assert (await client.post("/v1/wake")).json()["state"] == "serving"
        assert coordinator.control == ["sleep wait", "resume", "wake, stay paused", "wake"]

    with_service(test)


def test_a_group_that_cannot_be_woken_is_a_503_with_the_reason() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        await client.post("/v1/sleep")
        coordinator.wake_error = "0 of 4 leases were granted"
        answer = await client.post("/v1/wake")
        assert answer.status_code == 503
        assert "0 of 4 leases" in answer.json()["error"]["message"]
        assert "retry-after" in answer.headers

    with_service(test)


def test_what_does_not_end_within_the_bound_is_a_503_that_says_what_it_waits_for() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        coordinator.stuck = PauseStatus(
            ServingState.PAUSING, PauseMode.WAIT, waiting_for="3 samples that have begun"
        )
        answer = await client.post("/v1/pause", json={"mode": "wait"})
        assert answer.status_code == 503
        assert "3 samples that have begun" in answer.json()["error"]["message"]

    with_service(test, settings=SETTINGS.model_copy(update={"max_wait_s": 0.05}))


def test_a_client_that_goes_leaves_the_pause_to_itself() -> None:
    async def test() -> None:
        coordinator = FakeCoordinator()
        coordinator.stuck = PauseStatus(ServingState.PAUSING, PauseMode.KEEP, waiting_for="a step")
        app = create_app(coordinator, SETTINGS, FakeTokenizer())
        client = LeavingClient(app, {"mode": "keep"}, path="/v1/pause")
        while not coordinator.control:
            await asyncio.sleep(0.01)
        await client.leave()
        assert coordinator.control == ["pause keep"]

    run_bounded(test())


def test_weights_of_a_directory_are_loaded_under_the_name_that_they_are_given() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        body = {"version": "7", "path": "/w/7"}
        assert (await client.put("/v1/weights", json=body)).json()["version"] == "7"
        delta = {"version": "8", "path": "/w/8", "base_version": "7", "checksum": "ab"}
        await client.put("/v1/weights", json=delta)
        assert coordinator.updates == [
            WeightUpdate(DiskWeights("/w/7"), "7"),
            WeightUpdate(DiskWeights("/w/8"), "8", "7", "ab"),
        ]
        status = (await client.get("/v1/weights")).json()
        assert (status["version"], status["error"]) == ("8", "")

    with_service(test)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RequestError("is '7', which serves", field="version"), 400),
        (WeightUpdateError("worker 2 has no memory; version 6 serves on"), 500),
        (UnavailableError("another update is under way"), 503),
    ],
)
def test_a_failed_update_says_why_and_a_retry_works(error: Exception, code: int) -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        coordinator.update_error = error
        body = {"version": "7", "path": "/w/7"}
        answer = await client.put("/v1/weights", json=body)
        assert answer.status_code == code
        assert answer.json()["error"]["message"] == error.message  # type: ignore[attr-defined]
        coordinator.update_error = None
        assert (await client.put("/v1/weights", json=body)).status_code == 200

    with_service(test)


@pytest.mark.parametrize(
    ("method", "path", "body", "field"),
    [
        ("POST", "/v1/pause", {"mode": "stop"}, "mode"),
        ("POST", "/v1/pause", {"mode": "keep", "force": True}, "force"),
        ("POST", "/v1/sleep", {"mode": 1}, "mode"),
        ("POST", "/v1/wake", {"paused": "yes"}, "paused"),
        ("PUT", "/v1/weights", {"path": "/w"}, "version"),
        ("PUT", "/v1/weights", {"version": "", "path": "/w"}, "version"),
        ("PUT", "/v1/weights", {"version": "7", "path": ""}, "path"),
    ],
)
def test_what_is_wrong_is_named(method: str, path: str, body: dict[str, Any], field: str) -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        answer = await client.request(method, path, json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["field"] == field
        assert coordinator.control == []
        assert coordinator.updates == []

    with_service(test)


@pytest.mark.parametrize(
    ("current", "following"),
    [("0", "1"), ("9", "10"), ("step-9", "step-9+1"), ("step-9+1", "step-9+2"), ("a+b", "a+b+1")],
)
def test_weights_without_a_name_get_the_next_number(current: str, following: str) -> None:
    assert next_version(current) == following
