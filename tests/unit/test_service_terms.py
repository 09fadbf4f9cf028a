"""The terms of a rollout over HTTP: what is passed on, what is refused, by which name."""

from typing import Any

import httpx
import pytest

from actors.rollout_api import SampleStart
from placement.ids import RolloutId
from tests.unit.fake_coordinator import FakeCoordinator
from tests.unit.service_client import body, with_service


def test_priority_deadline_and_oversampling_reach_the_coordinator() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        asked = body(id="a", n=2, num_started=3, priority=-4, deadline_s=1.5)
        answer = (await client.post("/v1/rollouts", json=asked)).json()
        assert len(answer["samples"]) == 3
        request = coordinator.requests[RolloutId("a")]
        assert (request.num_samples, request.num_wanted) == (3, 2)
        assert (request.priority, request.deadline_s) == (-4, 1.5)

    with_service(test)


def test_a_rollout_that_asks_for_nothing_special_waits_for_all_it_starts() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        await client.post("/v1/rollouts", json=body(id="a", n=2))
        request = coordinator.requests[RolloutId("a")]
        assert (request.num_samples, request.num_wanted) == (2, None)
        assert (request.priority, request.deadline_s, request.starts) == (0, None, None)

    with_service(test)


def test_partials_reach_the_coordinator_with_their_seeds() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        samples = [{"generated_ids": [1, 2, 3], "seed": 9}, {}]
        response = await client.post("/v1/rollouts", json=body(id="a", n=2, samples=samples))
        assert response.status_code == 200
        assert coordinator.requests[RolloutId("a")].starts == (
            SampleStart((1, 2, 3), 9),
            SampleStart(),
        )

    with_service(test)


@pytest.mark.parametrize(
    ("change", "field", "said"),
    [
        ({"n": 3, "num_started": 2}, "num_started", "n is 3"),
        ({"n": 3, "num_started": 17}, "num_started", "17 samples"),
        ({"num_started": 0}, "num_started", "0"),
        ({"deadline_s": 0}, "deadline_s", "0"),
        ({"deadline_s": 1e300}, "deadline_s", "1e+300"),
        ({"priority": 0.5}, "priority", "0.5"),
        ({"reconnect_s": -1}, "reconnect_s", "-1"),
        ({"stream": "everything"}, "stream", "everything"),
        ({"samples": []}, "samples", "1 samples"),
        ({"samples": [{"seed": -1}]}, "samples[0].seed", "-1"),
        ({"samples": [{"token_ids": [1]}]}, "samples[0].token_ids", "[1]"),
        (
            {"samples": [{"generated_ids": [1] * 8}]},
            "samples[0].generated_ids",
            "8 tokens were generated and max_tokens is 8",
        ),
        ({"samples": [{"generated_ids": [512]}]}, "samples[0].generated_ids", "512"),
        ({"samples": [{"generated_ids": [7, 256]}]}, "samples[0].generated_ids", "256"),
        (
            {"samples": [{"generated_ids": [7] * 4}], "replay_stop_tokens": [[4]]},
            "replay_stop_tokens[0][0]",
            "5 to max_tokens",
        ),
    ],
)
def test_terms_that_cannot_be_kept_are_refused_by_the_callers_name(
    change: dict[str, Any], field: str, said: str
) -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        response = await client.post("/v1/rollouts", json=body(**change))
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["field"] == field
        assert said in error["message"]
        assert not coordinator.requests

    with_service(test)


def test_the_same_id_without_a_seed_joins_too() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        answers = [
            (await client.post("/v1/rollouts", json=body(id="step-1"))).json() for _ in range(2)
        ]
        assert answers[0] == answers[1]
        other = (await client.post("/v1/rollouts", json=body(id="step-2"))).json()
        assert other["rollout"]["seed"] != answers[0]["rollout"]["seed"]

    with_service(test)


def test_headers_by_which_others_route_change_nothing() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        plain = (await client.post("/v1/rollouts", json=body(id="a"))).json()
        headers = {"X-Session-ID": "s-1", "X-data-parallel-rank": "3"}
        same = (await client.post("/v1/rollouts", json=body(id="a"), headers=headers)).json()
        assert same == plain

    with_service(test)
