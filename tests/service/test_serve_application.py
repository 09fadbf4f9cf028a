"""The service through Ray Serve: real HTTP, a real connection that is closed, real processes."""

import json
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import ray

from placement.ids import RolloutId

pytestmark = pytest.mark.timeout(180)

LIMIT_S = 30.0
POLL_S = 0.05


def body(rollout_id: str, **changes: Any) -> dict[str, Any]:
    return {"id": rollout_id, "prompts": ["hi"], "sampling": {"max_tokens": 8}} | changes


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {LIMIT_S} s: {what}"
        time.sleep(POLL_S)


def test_samples_arrive_one_by_one(url: str, coordinator: ray.actor.ActorHandle) -> None:
    with (
        httpx.Client(base_url=url, timeout=LIMIT_S) as client,
        client.stream("POST", "/v1/rollouts", json=body("a", n=2, stream=True)) as answer,
    ):
        assert answer.status_code == 200
        lines = answer.iter_lines()
        assert json.loads(next(lines))["type"] == "rollout"
        for number in range(2):
            # The next one ends only after the one before has arrived.
            ray.get(coordinator.finish.remote(RolloutId("a"), 1), timeout=LIMIT_S)
            sample = json.loads(next(lines))
            assert (sample["type"], sample["sample_id"]) == ("sample", f"a/0/{number}")
            assert sample["text"] == "hi"
        assert json.loads(next(lines))["type"] == "summary"
        assert list(lines) == []


@pytest.mark.parametrize("stream", [True, False])
def test_a_connection_that_closes_ends_its_rollout(
    url: str, coordinator: ray.actor.ActorHandle, stream: bool
) -> None:
    name = f"gone-{stream}"
    with httpx.Client(base_url=url, timeout=LIMIT_S) as client:
        if stream:
            with client.stream("POST", "/v1/rollouts", json=body(name, stream=True)) as answer:
                next(answer.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/rollouts", json=body(name), timeout=2.0)

    def aborted() -> bool:
        return name in ray.get(coordinator.aborted_ids.remote(), timeout=LIMIT_S)

    wait_until(aborted, f"the abort of {name}")


def test_errors_keep_their_shape_on_the_way_through_serve(
    url: str, coordinator: ray.actor.ActorHandle
) -> None:
    with httpx.Client(base_url=url, timeout=LIMIT_S) as client:
        refused = client.post("/v1/rollouts", json=body("bad", prompts=[[512]]))
        assert refused.status_code == 400
        assert refused.json()["error"]["field"] == "prompts[0][0]"
        unknown = client.get("/v1/rollouts/none")
        assert unknown.status_code == 404
        assert unknown.json()["error"]["type"] == "UnknownIdError"


def test_health_workers_and_metrics_answer(url: str, coordinator: ray.actor.ActorHandle) -> None:
    with httpx.Client(base_url=url, timeout=LIMIT_S) as client:
        assert client.get("/health").json()["healthy"] is True
        assert client.get("/v1/workers").json()[0]["state"] == "decoding"
        assert "flexfloor_tokens_total" in client.get("/metrics").text


def test_a_slash_at_the_end_of_a_path_is_kept_on_the_way_through_serve(
    url: str, coordinator: ray.actor.ActorHandle
) -> None:
    with httpx.Client(base_url=url, timeout=LIMIT_S) as client:
        assert client.get("/get_world_size/").json() == {"world_size": 1}
        assert client.get("/v1/workers/").status_code == 404
        of_trl = client.post("/generate/", json={"prompts": []})
        assert of_trl.json()["error"]["field"] == "prompts"
        of_sglang = client.post("/generate", json={})
        assert of_sglang.json()["error"]["field"] == "text"


def test_pauses_and_sleep_go_through_serve_to_their_end(
    url: str, coordinator: ray.actor.ActorHandle
) -> None:
    with httpx.Client(base_url=url, timeout=LIMIT_S) as client:
        assert client.post("/v1/pause", json={"mode": "keep"}).json()["state"] == "paused"
        assert client.get("/is_paused").json() == {"is_paused": True}
        assert client.post("/continue_generation", json={}).json()["status"] == "ok"
        assert client.post("/sleep?level=1").json()["status"] == "sleeping"
        assert client.post("/wake_up?tags=weights").json()["status"] == "sleeping"
        assert client.post("/resume_memory_occupation").json()["success"] is True
        assert client.get("/v1/pause").json()["state"] == "serving"
