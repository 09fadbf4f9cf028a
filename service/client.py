"""A client of the service's native dialect, over HTTP, for code that awaits.

Every rollout of a call has one id, made here: a request that is sent again joins what it started
and starts nothing twice, and a connection that drops is taken up at its cursor. ``FlexFloorClient``
(``service.sync_client``) is the same for code that does not await.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import httpx
from pydantic import TypeAdapter

from actors.control_api import PauseMode, PauseStatus, WeightStatus
from actors.rollout_api import Health, OperationStatus, RolloutStatus, SampleNews, WorkerStatus
from placement.errors import FlexFloorError, UnknownIdError
from service.client_calls import Calls, Patience, TryAgainError
from service.client_terms import Prompts, RolloutOptions, RolloutResult, body_of
from service.schemas import (
    NewsAnswer,
    RolloutAnswer,
    RolloutBody,
    SampleAnswer,
    SamplingBody,
    StreamOf,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")
_Lines = AsyncGenerator[dict[str, Any], None]

_STATUS = TypeAdapter(RolloutStatus)
_SAMPLE = TypeAdapter(SampleAnswer)
_NEWS = TypeAdapter(tuple[NewsAnswer, ...])
_ANSWER = TypeAdapter(RolloutAnswer)

_CONNECT_S = 10.0
_FAREWELL_S = 5.0
"""Bound on the abort of a rollout that its caller does not read to the end."""


class AsyncFlexFloorClient:
    """Args:
        base_url: of the service, "http://host:8000".
        token: of its token file, if it has one.
        silence_s: a connection that says nothing for so long is taken for dead, and another one
            takes up at its cursor.
        patience: with a service that cannot be reached or is busy.
        transport: for a service in the same process.

    Every method raises RequestError, with field and value, for what is wrong with its arguments,
    UnknownIdError for a rollout that is not known (any more), and UnavailableError or
    OverloadedError when its patience is at an end.
    """

    def __init__(
        self,
        base_url: str,
        *,
        token: str | None = None,
        silence_s: float = 300.0,
        patience: Patience | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._patience = patience or Patience()
        self._http = httpx.AsyncClient(
            base_url=base_url,
            headers={"Authorization": f"Bearer {token}"} if token else None,
            timeout=httpx.Timeout(silence_s, connect=_CONNECT_S),
            limits=httpx.Limits(max_connections=None),
            transport=transport,
        )
        self._calls = Calls(self._http)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    # Rollouts

    async def rollout(
        self, prompts: Prompts, sampling: SamplingBody, **options: Unpack[RolloutOptions]
    ) -> RolloutResult:
        """All samples, once they have ended."""
        samples: list[SampleAnswer] = []
        body = body_of(prompts, sampling, options)
        async with aclosing(self._follow(body, StreamOf.SAMPLES)) as lines:
            async for line in lines:
                if line["type"] == "sample":
                    samples.append(_SAMPLE.validate_python(line, strict=False))
                else:
                    status = _STATUS.validate_python(line, strict=False)
        return RolloutResult.of(status, samples)

    async def stream(
        self, prompts: Prompts, sampling: SamplingBody, **options: Unpack[RolloutOptions]
    ) -> AsyncGenerator[SampleAnswer, None]:
        """Samples as they end. Whoever stops reading ends the rollout, unless
        ``abort_on_disconnect`` is false."""
        body = body_of(prompts, sampling, options)
        async with aclosing(self._follow(body, StreamOf.SAMPLES)) as lines:
            async for line in lines:
                if line["type"] == "sample":
                    yield _SAMPLE.validate_python(line, strict=False)

    async def stream_tokens(
        self, prompts: Prompts, sampling: SamplingBody, **options: Unpack[RolloutOptions]
    ) -> AsyncGenerator[SampleNews, None]:
        """Tokens as they are decoded; the last news of a sample have its finish reason."""
        body = body_of(prompts, sampling, options)
        async with aclosing(self._follow(body, StreamOf.TOKENS)) as lines:
            async for line in lines:
                if line["type"] == "tokens":
                    for news in _NEWS.validate_python(line["samples"], strict=False):
                        yield news

    async def status(self, rollout_id: str) -> RolloutStatus:
        return (await self._ask(_ANSWER, "GET", f"/v1/rollouts/{rollout_id}")).rollout

    async def abort(self, rollout_id: str) -> RolloutResult:
        """End it; the samples are those that were unfinished, with what they have."""
        answer = await self._ask(_ANSWER, "DELETE", f"/v1/rollouts/{rollout_id}")
        return RolloutResult.of(answer.rollout, answer.samples)

    # The group

    async def workers(self) -> list[WorkerStatus]:
        return await self._ask(TypeAdapter(list[WorkerStatus]), "GET", "/v1/workers")

    async def operations(self) -> list[OperationStatus]:
        return await self._ask(TypeAdapter(list[OperationStatus]), "GET", "/v1/operations")

    async def health(self) -> Health:
        """Whether there is progress, and what is wrong where there is none. Asked once."""
        told = await self._calls.answer("GET", "/health", answers=(503,))
        return TypeAdapter(Health).validate_json(told)

    async def weights(self) -> WeightStatus:
        return await self._ask(TypeAdapter(WeightStatus), "GET", "/v1/weights")

    async def update_weights(
        self, version: str, path: str, *, base_version: str | None = None, checksum: str = ""
    ) -> WeightStatus:
        """Serve what is in a directory that the coordinator's node can read; see
        ``actors.control_api.WeightUpdate``. Returns when new tokens are decoded with it."""
        body = {"version": version, "path": path, "base_version": base_version}
        if checksum:
            body["checksum"] = checksum
        return await self._ask(TypeAdapter(WeightStatus), "PUT", "/v1/weights", body=body)

    async def pause(self, mode: PauseMode = PauseMode.KEEP) -> PauseStatus:
        return await self._control("pause", {"mode": mode})

    async def resume(self) -> PauseStatus:
        return await self._control("resume")

    async def sleep(self, mode: PauseMode = PauseMode.ABORT) -> PauseStatus:
        """Give every slot back to the cluster."""
        return await self._control("sleep", {"mode": mode})

    async def wake(self) -> PauseStatus:
        return await self._control("wake")

    async def _control(self, what: str, body: dict[str, Any] | None = None) -> PauseStatus:
        return await self._ask(TypeAdapter(PauseStatus), "POST", f"/v1/{what}", body=body or {})

    # On the way

    async def _ask(self, kind: TypeAdapter[T], method: str, path: str, *, body: Any = None) -> T:
        failures = 0
        while True:
            try:
                return kind.validate_json(await self._calls.answer(method, path, body=body))
            except TryAgainError as error:
                failures += 1
                await asyncio.sleep(self._patience.pause_s(failures, error))

    async def _follow(self, body: RolloutBody, of: StreamOf) -> _Lines:
        """Every line once but the first: those with something new, and the summary."""
        try:
            async for line in self._lines_once(body, of):
                yield line
        except (GeneratorExit, asyncio.CancelledError):
            if body.abort_on_disconnect:
                await self._say_farewell(str(body.id))
            raise

    async def _lines_once(self, body: RolloutBody, of: StreamOf) -> _Lines:
        path = f"/v1/rollouts/{body.id}/stream"
        sent = body.model_dump(mode="json", exclude_unset=True) | {"stream": of}
        seen: set[str] = set()
        accepted, cursor, failures = False, 0, 0
        while True:
            began_s = time.monotonic()
            asked = (
                self._calls.lines("GET", path, cursor=cursor, of=of)
                if accepted
                else self._calls.lines("POST", "/v1/rollouts", body=sent)
            )
            try:
                async with asked as lines:
                    async for line in lines:
                        accepted = True
                        if line["type"] == "rollout":
                            continue
                        cursor, failures = line["cursor"], 0
                        if line["type"] == "summary":
                            yield line
                            return
                        if line.get("sample_id") not in seen:
                            seen.update([line["sample_id"]] if "sample_id" in line else [])
                            yield line
                raise TryAgainError(f"the answer for rollout {body.id} broke off")
            except UnknownIdError as error:
                if not accepted or of is StreamOf.TOKENS:
                    raise
                # The coordinator lost it. What has ended is here; the rest is asked for again.
                accepted, cursor = False, 0
                lost = TryAgainError(f"rollout {body.id} was lost: {error}")
            except TryAgainError as error:
                lost = error
            if time.monotonic() - began_s > self._patience.longest_pause_s:
                failures = 0
            failures += 1
            await asyncio.sleep(self._patience.pause_s(failures, lost))

    async def _say_farewell(self, rollout_id: str) -> None:
        """Nobody reads the rest. If this does not get through, the service waits in vain for
        ``reconnect_s`` and then ends it by itself."""
        try:
            async with asyncio.timeout(_FAREWELL_S):
                await self._calls.answer("DELETE", f"/v1/rollouts/{rollout_id}")
        except (FlexFloorError, TimeoutError) as error:
            logger.info("rollout %s, which nobody reads, was not ended: %s", rollout_id, error)
