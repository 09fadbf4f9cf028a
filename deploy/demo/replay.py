"""One rollout over HTTP, watched from outside: what any caller of the service could do.

Two things go on at once: the answer is read line by line, and workers, changes of the group and
progress are polled. The poll's interval is the resolution of snapshots; nothing that the report
counts is taken from them.
"""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
from pydantic import TypeAdapter

from actors.rollout_api import OperationStatus, RolloutStatus, SampleResult, WorkerStatus
from deploy.demo.records import ArrivedSample, Replay, Snapshot
from placement.errors import UnavailableError

POLL_S = 0.25
OPERATION_TIMEOUT_S = 60.0
"""Bound on a change that is still in progress when its rollout has ended."""

_STATUS: TypeAdapter[RolloutStatus] = TypeAdapter(RolloutStatus)
_SAMPLE: TypeAdapter[SampleResult] = TypeAdapter(SampleResult)
_WORKERS: TypeAdapter[tuple[WorkerStatus, ...]] = TypeAdapter(tuple[WorkerStatus, ...])
_OPERATIONS: TypeAdapter[tuple[OperationStatus, ...]] = TypeAdapter(tuple[OperationStatus, ...])


@dataclass(frozen=True, slots=True)
class Observation:
    """What one poll saw; handed to whoever shows the progress."""

    num_samples: int
    num_ended: int
    workers: tuple[WorkerStatus, ...]
    operations: tuple[OperationStatus, ...]


Observe = Callable[[Observation], None]


class RolloutClient:
    """The service's HTTP interface, as far as the demo uses it."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def replay(self, body: dict[str, Any], timeout_s: float, observe: Observe) -> Replay:
        """Post a rollout and follow it to its end.

        Raises:
            UnavailableError: the service refused it, broke off, or took too long.
        """
        arrived: list[ArrivedSample] = []
        snapshots: list[Snapshot] = []
        num_samples = len(body["prompts"]) * body["n"]
        following = asyncio.create_task(self._follow(body, timeout_s, arrived))
        try:
            while not following.done():
                workers = await self.workers()
                snapshots.append(Snapshot(time.time(), workers))
                operations = await self.operations()
                observe(Observation(num_samples, len(arrived), workers, operations))
                await asyncio.wait({following}, timeout=POLL_S)
        finally:
            following.cancel()
        status = following.result()
        operations = await self.settled_operations()
        observe(Observation(num_samples, len(arrived), await self.workers(), operations))
        ended_at = status.accepted_at + status.usage.span_s
        return Replay(
            status=status,
            samples=tuple(arrived),
            operations=tuple(
                op for op in operations if status.accepted_at <= op.started_at < ended_at
            ),
            snapshots=tuple(s for s in snapshots if s.at < ended_at),
        )

    async def workers(self) -> tuple[WorkerStatus, ...]:
        return _WORKERS.validate_python(await self._get("/v1/workers"))

    async def operations(self) -> tuple[OperationStatus, ...]:
        return _OPERATIONS.validate_python(await self._get("/v1/operations"))

    async def settled_operations(self) -> tuple[OperationStatus, ...]:
        """The changes of the group, when the last one that a rollout caused has ended.

        Raises:
            UnavailableError: one that makes the group smaller has not ended in time.
        """
        deadline = time.monotonic() + OPERATION_TIMEOUT_S
        while True:
            operations = await self.operations()
            # A group that wants to grow may have to wait for somebody else's slots.
            open_ones = [
                op
                for op in operations
                if op.ended_at is None and len(op.new_members) < len(op.old_members)
            ]
            if not open_ones:
                return operations
            if time.monotonic() > deadline:
                raise UnavailableError(
                    f"the change to {len(open_ones[0].new_members)} workers has been in phase "
                    f"{open_ones[0].phase} for more than {OPERATION_TIMEOUT_S:.0f} s"
                )
            await asyncio.sleep(POLL_S)

    async def wait_for_workers(self, count: int, timeout_s: float, observe: Observe) -> None:
        """Until ``count`` members are ready to decode and no change of the group is open.

        Raises:
            UnavailableError: they were not in time.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            workers, operations = await self.workers(), await self.operations()
            observe(Observation(0, 0, workers, operations))
            ready = sum(w.state in ("idle", "decoding") for w in workers)
            if ready == count and all(op.ended_at is not None for op in operations):
                return
            if time.monotonic() > deadline:
                raise UnavailableError(
                    f"{ready} of {count} workers are ready after {timeout_s:.0f} s: "
                    f"{', '.join(f'{w.slot or w.worker_id} {w.state}' for w in workers)}"
                )
            await asyncio.sleep(POLL_S)

    async def _follow(
        self, body: dict[str, Any], timeout_s: float, arrived: list[ArrivedSample]
    ) -> RolloutStatus:
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._http.stream("POST", "/v1/rollouts", json=body, timeout=timeout_s) as answer,
            ):
                if answer.status_code != 200:
                    text = (await answer.aread()).decode()
                    raise UnavailableError(
                        f"POST /v1/rollouts answered {answer.status_code}: {text}"
                    )
                async for line in answer.aiter_lines():
                    told = json.loads(line)
                    if told["type"] == "sample":
                        sample = _SAMPLE.validate_python(told)
                        arrived.append(ArrivedSample(time.time(), sample))
                    elif told["type"] == "summary":
                        return _STATUS.validate_python(told)
                    elif told["type"] == "error":
                        raise UnavailableError(f"the rollout broke off: {told['error']}")
        except TimeoutError as error:
            raise UnavailableError(
                f"rollout {body['id']} has {len(arrived)} ended samples after {timeout_s:.0f} s"
            ) from error
        raise UnavailableError(f"the answer to rollout {body['id']} ended without a summary")

    async def _get(self, path: str) -> Any:
        answer = await self._http.get(path)
        if answer.status_code != 200:
            raise UnavailableError(f"GET {path} answered {answer.status_code}: {answer.text}")
        return answer.json()
