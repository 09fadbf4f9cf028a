"""The service in this process: over httpx, or as raw ASGI where a client must disappear."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import httpx
from fastapi import FastAPI

from service.app import create_app
from service.settings import ServiceSettings
from tests.unit.fake_coordinator import FakeCoordinator

LIMIT_S = 10.0
SETTINGS = ServiceSettings(poll_wait_s=0.2, max_prompts=8, max_samples_per_rollout=16)


class FakeTokenizer:
    """A byte is a token."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: list[int]) -> str:
        return bytes(token_ids).decode()


def body(**changes: Any) -> dict[str, Any]:
    return {"prompts": ["hi"], "sampling": {"max_tokens": 8}} | changes


def with_service(
    test: Callable[[httpx.AsyncClient, FakeCoordinator], Awaitable[None]],
    *,
    settings: ServiceSettings = SETTINGS,
    tokenizer: FakeTokenizer | None = None,
    auto_finish: bool = True,
) -> None:
    """Run ``test`` with a client of a service whose coordinator is a fake."""

    async def run() -> None:
        coordinator = FakeCoordinator(auto_finish=auto_finish)
        app = create_app(coordinator, settings, tokenizer or FakeTokenizer())
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with (
            asyncio.timeout(LIMIT_S),
            httpx.AsyncClient(transport=transport, base_url="http://service") as client,
        ):
            await test(client, coordinator)

    asyncio.run(run())


def run_bounded(work: Coroutine[Any, Any, None]) -> None:
    async def run() -> None:
        async with asyncio.timeout(LIMIT_S):
            await work

    asyncio.run(run())


class LeavingClient:
    """Posts a rollout over raw ASGI, reads as long as it likes, and goes."""

    def __init__(self, app: FastAPI, payload: dict[str, Any]) -> None:
        self._gone = asyncio.Event()
        self._received: asyncio.Queue[bytes] = asyncio.Queue()
        self._body: list[bytes] = [json.dumps(payload).encode()]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": "/v1/rollouts",
            "raw_path": b"/v1/rollouts",
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json")],
            "client": ("client", 1),
            "server": ("service", 80),
        }
        self.request = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._body:
            return {"type": "http.request", "body": self._body.pop(), "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            for line in message["body"].splitlines():
                self._received.put_nowait(line)

    async def next_line(self) -> dict[str, Any]:
        line: dict[str, Any] = json.loads(await self._received.get())
        return line

    async def leave(self) -> None:
        """Close the connection and wait until the service has noticed."""
        self._gone.set()
        await self.request
