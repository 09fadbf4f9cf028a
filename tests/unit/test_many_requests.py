"""Thousands of clients at once on real connections, some of whom give up and ask again: every one
gets its own answer, nothing is decoded twice, and what the service holds for them is bounded."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import psutil
import pytest
import uvicorn

from placement.ids import RolloutId
from service.app import create_app
from service.settings import ServiceSettings
from tests.unit.fake_coordinator import FakeCoordinator
from tests.unit.service_client import FakeTokenizer, body

pytestmark = pytest.mark.timeout(180)

NUM_OPEN = 4096
NUM_IMPATIENT = 512
LIMIT_S = 150.0
STEP_S = 0.05
MAX_BYTES_PER_REQUEST = 100 << 10
"""Client and server together, which share this process: two ends of a connection with their
buffers, a task each, a rollout of one sample."""


class FakeBusyCoordinator(FakeCoordinator):
    async def finish_everything(self) -> None:
        """All at once, so that those who wait are woken once."""
        async with self._changed:
            for rollout_id, ended in self.ended.items():
                ended += [
                    self._result(rollout_id, n, self.ending) for n in range(self._total(rollout_id))
                ]
            self._changed.notify_all()


@asynccontextmanager
async def serving(coordinator: FakeCoordinator) -> AsyncIterator[str]:
    app = create_app(coordinator, ServiceSettings(poll_wait_s=60), FakeTokenizer())
    config = uvicorn.Config(app, log_level="error", lifespan="off", backlog=NUM_OPEN)
    server = uvicorn.Server(config)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        task = asyncio.create_task(server.serve([listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task


async def ask_all_at_once() -> None:
    coordinator = FakeBusyCoordinator(auto_finish=False)
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        asyncio.timeout(LIMIT_S),
        serving(coordinator) as url,
        aiohttp.ClientSession(connector=connector) as session,
    ):
        before_bytes = psutil.Process().memory_info().rss

        async def ask(number: int) -> dict[str, Any]:
            asked = body(id=f"many-{number}", prompts=[[number % 256]], reconnect_s=60)
            async with session.post(f"{url}/v1/rollouts", json=asked) as response:
                assert response.status == 200
                answer: dict[str, Any] = await response.json()
                return answer

        calls = [asyncio.ensure_future(ask(number)) for number in range(NUM_OPEN)]
        while len(coordinator.requests) < NUM_OPEN:
            await asyncio.sleep(STEP_S)
        held_bytes = psutil.Process().memory_info().rss - before_bytes
        assert held_bytes < NUM_OPEN * MAX_BYTES_PER_REQUEST, held_bytes / NUM_OPEN

        impatient = calls[:: NUM_OPEN // NUM_IMPATIENT]
        for call in impatient:
            call.cancel()
        await asyncio.wait(impatient)
        for number in range(0, NUM_OPEN, NUM_OPEN // NUM_IMPATIENT):
            calls[number] = asyncio.ensure_future(ask(number))
        while coordinator.submitted < NUM_OPEN + NUM_IMPATIENT:
            await asyncio.sleep(STEP_S)

        await coordinator.finish_everything()
        answers = await asyncio.gather(*calls)
    for number, answer in enumerate(answers):
        (sample,) = answer["samples"]
        assert answer["rollout"]["rollout_id"] == f"many-{number}"
        assert sample["sample_id"] == f"many-{number}/0/0"
    assert len(coordinator.requests) == NUM_OPEN
    assert coordinator.requests[RolloutId("many-7")].prompts == ((7,),)
    assert coordinator.aborted == []


def test_thousands_of_open_requests_are_answered_once_each_and_retries_join() -> None:
    asyncio.run(ask_all_at_once())
