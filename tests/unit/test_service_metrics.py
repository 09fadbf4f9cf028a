"""The replica counts what it answers, by dialect and code, and tells it behind the coordinator."""

import asyncio

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from service.app import create_app
from tests.unit.fake_coordinator import FakeCoordinator
from tests.unit.service_client import (
    SETTINGS,
    FakeTokenizer,
    LeavingClient,
    body,
    run_bounded,
    with_service,
)


async def scrape(client: httpx.AsyncClient) -> dict[tuple[str, ...], float]:
    """(series, dialect and code where it has them) -> value."""
    text = (await client.get("/metrics")).text
    return {
        (sample.name, *(sample.labels[n] for n in ("dialect", "code") if n in sample.labels)): (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.mark.parametrize(
    ("path", "asked", "dialect"),
    [
        ("/v1/rollouts", body(), "native"),
        ("/v1/completions", {"prompt": "a"}, "openai"),
        ("/generate", {"text": "a"}, "sglang"),
        ("/inference/v1/generate", {"token_ids": [1]}, "vllm"),
    ],
)
def test_requests_are_counted_by_dialect_and_code(
    path: str, asked: dict[str, object], dialect: str
) -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        before = await scrape(client)
        assert before["flexfloor_http_requests_total", dialect, "200"] == 0
        await client.post(path, json=asked)
        await client.post(path, json={})
        await client.post(path, json={"no": "field"})
        now = await scrape(client)
        assert now["flexfloor_http_requests_total", dialect, "200"] == 1
        assert now["flexfloor_http_requests_total", dialect, "400"] == 2
        assert now["flexfloor_http_request_seconds_count", dialect] == 3
        assert now["flexfloor_http_open_requests",] == 1, "the scrape itself"

    with_service(test)


def test_a_scrape_has_the_coordinators_metrics_first() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        text = (await client.get("/metrics")).text
        assert text.index("flexfloor_tokens_total") < text.index("flexfloor_http_requests_total")

    with_service(test)


def test_what_matches_no_route_or_fails_inside_is_counted_too() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        await client.get("/nowhere")
        coordinator.submit_error = RuntimeError("a defect")
        assert (await client.post("/v1/rollouts", json=body())).status_code == 500
        now = await scrape(client)
        assert now["flexfloor_http_requests_total", "none", "404"] == 1
        assert now["flexfloor_http_requests_total", "native", "500"] == 1

    with_service(test)


def test_a_stream_is_measured_at_its_first_event_and_at_its_end() -> None:
    async def run() -> None:
        coordinator = FakeCoordinator(auto_finish=False)
        app = create_app(coordinator, SETTINGS, FakeTokenizer())
        asked = {"prompt": "a", "request_id": "s", "stream": True, "logprobs": 0}
        stream = LeavingClient(app, asked, "/v1/completions")
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://s") as client:
            while "s" not in coordinator.requests:
                await asyncio.sleep(0)
            series = "flexfloor_http_first_event_seconds_count", "openai"
            assert series not in await scrape(client)
            await coordinator.grow(next(iter(coordinator.requests)), 1)
            await stream.next_event()
            now = await scrape(client)
            assert now[series] == 1
            assert now["flexfloor_http_open_requests",] == 2
            await stream.leave()
            now = await scrape(client)
            assert now["flexfloor_http_open_requests",] == 1
            assert now["flexfloor_http_request_seconds_count", "openai"] == 1

    run_bounded(run())
