"""Clients that lose their connection in mid-stream and read on: nothing is lost, nothing comes
twice."""

import asyncio
import json
from collections import defaultdict
from typing import Any

import httpx
import pytest

from placement.ids import RolloutId
from service.app import create_app
from service.settings import ServiceSettings
from tests.unit.fake_coordinator import FakeCoordinator
from tests.unit.service_client import (
    SETTINGS,
    FakeTokenizer,
    LeavingClient,
    body,
    run_bounded,
    with_service,
)

A = RolloutId("a")
STEP_S = 0.01


def lines_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    return [json.loads(line) for line in response.text.splitlines()]


async def read_on(client: httpx.AsyncClient, cursor: int, of: str) -> list[dict[str, Any]]:
    response = await client.get("/v1/rollouts/a/stream", params={"cursor": cursor, "of": of})
    return lines_of(response)


def test_every_line_says_where_to_read_on() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        whole = lines_of(await client.post("/v1/rollouts", json=body(id="a", n=3, stream=True)))
        assert [line["cursor"] for line in whole] == [0, 1, 2, 3, 3]
        for line in whole[:-1]:
            rest = await read_on(client, line["cursor"], "samples")
            assert rest[0]["type"] == "rollout"
            assert rest[1:] == whole[line["cursor"] + 1 :]

    with_service(test)


def test_tokens_come_as_they_grow_and_each_sample_ends_once() -> None:
    async def test() -> None:
        coordinator = FakeCoordinator(auto_finish=False)
        coordinator.response = tuple(range(10, 30))
        app = create_app(coordinator, SETTINGS, FakeTokenizer())
        client = LeavingClient(app, body(id="a", n=2, stream="tokens"))
        assert (await client.next_line())["type"] == "rollout"
        await coordinator.grow(A, 5)
        line = await client.next_line()
        assert line["type"] == "tokens"
        assert [s["sample_index"] for s in line["samples"]] == [0, 1]
        assert all(s["token_ids"] == [10, 11, 12, 13, 14] for s in line["samples"])
        assert all(len(s["logprobs"]) == 5 for s in line["samples"])
        await coordinator.finish(A, 1)
        (news,) = (await client.next_line())["samples"]
        assert (news["start"], news["token_ids"]) == (5, list(range(15, 30)))
        assert news["finish_reason"] == "length"
        await coordinator.finish(A, 1)
        await client.next_line()
        assert (await client.next_line())["type"] == "summary"
        await client.request

    run_bounded(test())


@pytest.mark.parametrize("of", ["samples", "tokens"])
@pytest.mark.parametrize("seen_lines", [1, 2, 3, 4])
def test_a_connection_that_drops_in_mid_stream_loses_and_doubles_nothing(
    of: str, seen_lines: int
) -> None:
    async def test() -> None:
        coordinator = FakeCoordinator(auto_finish=False)
        coordinator.response = tuple(range(10, 30))
        app = create_app(coordinator, SETTINGS, FakeTokenizer())
        first = LeavingClient(app, body(id="a", n=6, stream=of, reconnect_s=30))
        heard = [await first.next_line()]
        for step in range(1, 7):
            await coordinator.grow(A, step)
            await coordinator.finish(A, 1)
            if len(heard) < seen_lines:
                heard.append(await first.next_line())
            elif not first.request.done():
                await first.leave()
        assert coordinator.aborted == []
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
            rest = await read_on(client, heard[-1]["cursor"], of)
        assert rest[-1]["type"] == "summary"
        assert rest[-1]["num_ended"] == 6
        told = heard[1:] + rest[1:-1]
        responses: dict[int, list[int]] = defaultdict(list)
        endings: list[int] = []
        for sample in [s for line in told for s in line.get("samples", [line])]:
            index = sample["sample_index"]
            assert sample["start"] == len(responses[index])
            responses[index] += sample["token_ids"]
            endings += [index] * (sample["finish_reason"] is not None)
        assert sorted(endings) == list(range(6))
        assert all(tuple(ids) == coordinator.response for ids in responses.values())

    run_bounded(test())


def test_a_client_that_stays_away_too_long_ends_its_rollout() -> None:
    async def test() -> None:
        coordinator = FakeCoordinator(auto_finish=False)
        app = create_app(coordinator, SETTINGS, FakeTokenizer())
        client = LeavingClient(app, body(id="a", stream=True, reconnect_s=0.3))
        await client.next_line()
        await client.leave()
        left_at = asyncio.get_running_loop().time()
        while not coordinator.aborted:
            await asyncio.sleep(STEP_S)
        assert asyncio.get_running_loop().time() - left_at >= 0.25

    run_bounded(test())


def test_a_client_that_comes_back_in_time_keeps_its_rollout_and_may_go_again() -> None:
    async def test() -> None:
        coordinator = FakeCoordinator(auto_finish=False)
        app = create_app(coordinator, SETTINGS, FakeTokenizer())
        same = body(id="a", stream=True, reconnect_s=0.3)
        first = LeavingClient(app, same)
        await first.next_line()
        await first.leave()
        second = LeavingClient(app, same)
        await second.next_line()
        await asyncio.sleep(0.5)  # the first one's time is over
        assert coordinator.aborted == []
        await second.leave()
        while not coordinator.aborted:
            await asyncio.sleep(STEP_S)

    run_bounded(test())


@pytest.mark.parametrize(
    ("path", "status", "field"),
    [
        ("/v1/rollouts/none/stream", 404, "rollout_id"),
        ("/v1/rollouts/a/stream?cursor=9", 400, "cursor"),
        ("/v1/rollouts/a/stream?cursor=9&of=tokens", 400, "cursor"),
        ("/v1/rollouts/a/stream?cursor=-1", 400, "cursor"),
        ("/v1/rollouts/a/stream?cursor=99999999999999999999", 400, "cursor"),
        ("/v1/rollouts/a/stream?of=words", 400, "of"),
        ("/v1/rollouts/a?samples=true&cursor=9", 400, "cursor"),
    ],
)
def test_a_place_that_does_not_exist_is_refused_before_the_stream_begins(
    path: str, status: int, field: str
) -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        await client.post("/v1/rollouts", json=body(id="a"))
        response = await client.get(path)
        assert response.status_code == status
        assert response.json()["error"]["field"] == field

    with_service(test)


def test_a_long_answer_is_fetched_in_many_polls_and_stays_whole() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        lines = lines_of(
            await client.post("/v1/rollouts", json=body(id="a", n=12, stream="samples"))
        )
        assert [line["sample_index"] for line in lines[1:-1]] == list(range(12))

    settings = ServiceSettings(poll_wait_s=0.2, poll_limit=2)
    with_service(test, settings=settings)
