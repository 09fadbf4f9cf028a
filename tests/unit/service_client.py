"""The service in this process: over httpx, or as raw ASGI where a client must disappear."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import httpx
from fastapi import FastAPI

from service.app import create_app
from service.settings import ServiceSettings
from tests.unit.fake_coordinator import FakeCoordinator

LIMIT_S = 10.0
SETTINGS = ServiceSettings(poll_wait_s=0.2, max_prompts=8, max_samples_per_rollout=16)


class FakeTokenizer:
    """A byte is a token; ids above are special and have no text unless they are to be seen."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        shown = (
            bytes([token]) if token < 256 else b"" if skip_special_tokens else b"<%d>" % token
            for token in token_ids
        )
        return b"".join(shown).decode(errors="replace")

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, add_generation_prompt: bool, tokenize: bool
    ) -> str:
        assert not tokenize
        if any(message["role"] == "nobody" for message in conversation):
            raise ValueError("no such role")
        said = "".join(f"{message['role']}: {message['content']}\n" for message in conversation)
        return said + ("assistant: " if add_generation_prompt else "")


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


@asynccontextmanager
async def waiting_for_samples(
    client: httpx.AsyncClient, coordinator: FakeCoordinator, rollout_id: str
) -> AsyncIterator[asyncio.Task[httpx.Response]]:
    """A request that has been accepted and waits for samples that do not end by themselves."""
    coordinator.auto_finish = False
    asking = asyncio.create_task(client.post("/v1/rollouts", json=body(id=rollout_id)))
    while rollout_id not in coordinator.requests:
        await asyncio.sleep(0.01)
    try:
        yield asking
    finally:
        asking.cancel()


def run_bounded(work: Coroutine[Any, Any, None]) -> None:
    async def run() -> None:
        async with asyncio.timeout(LIMIT_S):
            await work

    asyncio.run(run())


class LeavingClient:
    """Posts a request over raw ASGI, reads as long as it likes, and goes."""

    def __init__(self, app: FastAPI, payload: dict[str, Any], path: str = "/v1/rollouts") -> None:
        self._gone = asyncio.Event()
        self._received: asyncio.Queue[bytes] = asyncio.Queue()
        self._body: list[bytes] = [json.dumps(payload).encode()]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
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

    async def next_event(self) -> dict[str, Any]:
        """Of a stream of server-sent events."""
        while not (line := await self._received.get()).startswith(b"data: "):
            assert not line, "an event has no other fields"
        content: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
        return content

    async def leave(self) -> None:
        """Close the connection and wait until the service has noticed."""
        self._gone.set()
        await self.request
