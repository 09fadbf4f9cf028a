"""A coordinator that is killed in the middle of a rollout, with a journal on disk and workers that
host vLLM: whoever reads over HTTP goes on, and no token is another."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI

from actors.ray_coordinator import launch, shutdown_runtime
from service.app import create_app
from service.client import AsyncFlexFloorClient
from service.client_calls import Patience
from service.schemas import SampleAnswer, SamplingBody
from service.settings import ServiceSettings
from tests.cluster.real_runtime import RealRuntime, batch, settings, until

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(400)]

NUM_WORKERS = 2
PROMPTS = [list(prompt) for prompt in batch("prompts").prompts]
SAMPLING = SamplingBody(max_tokens=128, temperature=1.0, ignore_eos=True)


@pytest.fixture(scope="module")
def kept_runtime(cluster: str, model: str, tmp_path_factory: Any) -> Iterator[RealRuntime]:
    name = f"kept-{uuid.uuid4().hex[:8]}"
    plain = settings(name, model, max_workers=NUM_WORKERS)
    bounds = plain.coordinator.model_copy(
        update={"journal_dir": str(tmp_path_factory.mktemp("journal"))}
    )
    client = launch(plain.model_copy(update={"coordinator": bounds}))
    try:
        yield RealRuntime(client, name, cluster)
    finally:
        shutdown_runtime(name)


def _tokens(
    samples: Sequence[SampleAnswer],
) -> dict[int, tuple[tuple[int, ...], tuple[float, ...]]]:
    told = {s.prompt_index: (tuple(s.token_ids), tuple(s.logprobs)) for s in samples}
    assert len(told) == len(samples), "a sample was told twice"
    return told


@asynccontextmanager
async def served(app: FastAPI) -> AsyncIterator[str]:
    """Its address."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    serving = asyncio.ensure_future(server.serve())

    async def port() -> int | None:
        assert not serving.done(), serving.exception()
        return server.servers[0].sockets[0].getsockname()[1] if server.started else None

    try:
        yield f"http://127.0.0.1:{await until(port, 30, 'a server that listens')}"
    finally:
        server.should_exit = True
        await asyncio.wait_for(serving, 30)


async def test_a_killed_coordinator_costs_a_reader_nothing_and_changes_no_token(
    kept_runtime: RealRuntime, record_property: Any
) -> None:
    """As a static rollout, so that no change of the group is under way when it dies."""

    async def members() -> list[int] | None:
        pids = await kept_runtime.member_pids()
        return pids if len(pids) == NUM_WORKERS else None

    async def accepted() -> bool:
        return bool(await kept_runtime.client.open_rollouts())

    before = await until(members, 150, f"a group of {NUM_WORKERS}")
    app = create_app(kept_runtime.client, ServiceSettings(), None)
    patience = Patience(attempts=30, longest_pause_s=2.0)
    async with served(app) as url, AsyncFlexFloorClient(url, patience=patience) as client:
        undisturbed = await client.rollout(PROMPTS, SAMPLING, seed=3, strategy="static", id="a")
        reading = asyncio.ensure_future(
            client.rollout(PROMPTS, SAMPLING, seed=3, strategy="static", id="b")
        )
        await until(accepted, 30, "the rollout is accepted")
        await kept_runtime.decoding("b", 300)
        record_property("back_after_s", await kept_runtime.kill_coordinator())
        disturbed = await asyncio.wait_for(reading, 120)
        earlier = await client.status("a")
    assert _tokens(disturbed.samples) == _tokens(undisturbed.samples)
    assert len(disturbed.samples) == disturbed.rollout.num_ended == len(PROMPTS)
    assert {s.weight_versions for s in disturbed.samples} == {((0, "0"),)}
    assert all(len(s.worker_ids) == 1 for s in disturbed.samples), "a sample began again elsewhere"
    assert await members() == before
    assert earlier == undisturbed.rollout, "what had ended is not as it was"
    assert await _metric(kept_runtime, "group_restarts_total") == 0
    replayed = await _metric(kept_runtime, "journal_replayed_entries_total")
    record_property("replayed", replayed)
    assert replayed > len(PROMPTS)


async def _metric(runtime: RealRuntime, name: str) -> float:
    lines = (await runtime.client.metrics_text()).decode().splitlines()
    (value,) = (line.split()[1] for line in lines if line.startswith(f"flexfloor_{name} "))
    return float(value)
