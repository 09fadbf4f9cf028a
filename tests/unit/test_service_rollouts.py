import json
from typing import Any

import httpx

from actors.rollout_api import Strategy
from placement.errors import UnavailableError
from placement.ids import RolloutId
from placement.samples import Sampling, derive_sample_seed
from service.settings import ServiceSettings
from tests.unit.fake_coordinator import FakeCoordinator
from tests.unit.service_client import body, with_service


def _lines(response: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line) for line in response.text.splitlines()]


def test_a_waiting_request_is_answered_with_all_samples_and_the_usage() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        response = await client.post("/v1/rollouts", json=body(prompts=["hi", [1, 2]], n=3))
        assert response.status_code == 200
        answer = response.json()
        assert answer["done"] is True
        assert len(answer["samples"]) == 6
        assert answer["samples"][0]["text"] == "hi"
        assert answer["samples"][0]["logprobs"] == [-0.5, -0.25]
        assert answer["rollout"]["state"] == "finished"
        assert answer["rollout"]["usage"]["occupied_worker_steps"] == 40
        (request,) = coordinator.requests.values()
        assert request.prompts == ((104, 105), (1, 2))
        assert request.samplings == (Sampling(max_tokens=8),)

    with_service(test)


def test_a_stream_begins_with_the_rollout_and_ends_with_the_summary() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        response = await client.post("/v1/rollouts", json=body(n=2, stream=True, seed=5))
        assert response.headers["content-type"] == "application/x-ndjson"
        lines = _lines(response)
        assert [line["type"] for line in lines] == ["rollout", "sample", "sample", "summary"]
        assert lines[0]["seed"] == 5
        assert lines[1]["seed"] == derive_sample_seed(5, 0, 0)
        assert lines[-1]["usage"]["freed_worker_s"] == 3.0

    with_service(test)


def test_a_seed_that_is_not_given_is_drawn_and_named() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        answers = [(await client.post("/v1/rollouts", json=body())).json() for _ in range(2)]
        seeds = [answer["rollout"]["seed"] for answer in answers]
        assert seeds[0] != seeds[1]
        assert seeds == [request.seed for request in coordinator.requests.values()]

    with_service(test)


def test_the_same_id_with_the_same_content_joins_the_rollout() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        same = body(id="step-1", seed=1)
        first = (await client.post("/v1/rollouts", json=same)).json()
        again = (await client.post("/v1/rollouts", json=same)).json()
        assert again == first
        assert list(coordinator.requests) == ["step-1"]
        other = await client.post("/v1/rollouts", json=same | {"seed": 2})
        assert other.status_code == 400
        assert other.json()["error"]["field"] == "id"

    with_service(test)


def test_replays_carry_their_lengths_and_a_sampling_per_sample() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        greedy = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
        replay = body(
            id="replay",
            n=2,
            strategy="static",
            replay_stop_tokens=[[3, 8]],
            sample_samplings=[[greedy, {"max_tokens": 9, "top_k": 4}]],
        )
        assert (await client.post("/v1/rollouts", json=replay)).status_code == 200
        request = coordinator.requests[RolloutId("replay")]
        assert request.strategy is Strategy.STATIC
        assert request.replay_stop_tokens == ((3, 8),)
        assert request.sample_samplings == (
            (
                Sampling(max_tokens=8, temperature=0, ignore_eos=True),
                Sampling(max_tokens=9, top_k=4),
            ),
        )

    with_service(test)


def test_a_rollout_can_be_asked_for_page_by_page_and_aborted() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        late = await client.post("/v1/rollouts", json=body(id="slow", n=5))
        assert late.status_code == 503
        assert "max_wait_s" in late.json()["error"]["message"]
        assert coordinator.aborted == []  # it goes on; only an answer was bounded

        await coordinator.finish(RolloutId("slow"), 3)
        status = (await client.get("/v1/rollouts/slow")).json()
        assert status["rollout"]["num_ended"] == 3
        assert status["samples"] == []
        page = (await client.get("/v1/rollouts/slow?samples=true")).json()
        assert (len(page["samples"]), page["cursor"], page["done"]) == (2, 2, False)
        page = (await client.get("/v1/rollouts/slow?samples=true&cursor=2")).json()
        assert (len(page["samples"]), page["cursor"], page["done"]) == (1, 3, False)

        gone = (await client.delete("/v1/rollouts/slow")).json()
        assert gone["rollout"]["state"] == "aborted"
        assert [s["finish_reason"] for s in gone["samples"]] == ["abort", "abort"]
        assert all(s["token_ids"] == [104, 105] for s in gone["samples"])

    settings = ServiceSettings(max_wait_s=0.01, poll_wait_s=0.05, poll_limit=2)
    with_service(test, settings=settings, auto_finish=False)


def test_an_error_after_the_start_of_a_stream_is_its_last_line() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        coordinator.results_error = UnavailableError("the coordinator has gone")
        lines = _lines(await client.post("/v1/rollouts", json=body(stream=True)))
        assert [line["type"] for line in lines] == ["rollout", "error"]
        assert lines[1]["error"] == {
            "type": "UnavailableError",
            "message": "the coordinator has gone",
            "field": None,
        }

    with_service(test)


def test_health_says_503_and_the_age_when_nothing_progresses() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        assert (await client.get("/health")).status_code == 200
        coordinator.healthy = False
        response = await client.get("/health")
        assert response.status_code == 503
        assert response.json()["last_step_age_s"] == 61.0

    with_service(test)


def test_workers_operations_and_metrics_are_the_coordinators() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        (worker,) = (await client.get("/v1/workers")).json()
        assert worker["slot"] == "GPU:0"
        (operation,) = (await client.get("/v1/operations")).json()
        assert operation == (await client.get("/v1/operations/2")).json()
        assert operation["phase"] == "done"
        assert (await client.get("/v1/operations/9")).status_code == 404
        metrics = await client.get("/metrics")
        assert metrics.headers["content-type"].startswith("text/plain")
        assert b"flexfloor_tokens_total 3.0" in metrics.content

    with_service(test)


def test_the_documentation_names_the_request_and_the_answer() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        schemas = (await client.get("/openapi.json")).json()["components"]["schemas"]
        assert schemas["RolloutBody"]["additionalProperties"] is False
        assert (
            "Replays only"
            in (schemas["RolloutBody"]["properties"]["replay_stop_tokens"]["description"])
        )
        assert {"SamplingBody", "RolloutAnswer", "SampleAnswer"} <= schemas.keys()

    with_service(test)
